"""Counters and reports, from the kernels to Prometheus and to answers.

    worker    `counters` has the counts, `worker` attaches reports to a step's ModelRunnerOutput
    core      `core` forwards counts with the scheduler's statistics, reports with their tokens
    server    `metrics` exports to Prometheus and the log, `answers` sends reports to clients

No message, process or thread is added. `carrier` lists the vLLM objects that carry the data.
"""
