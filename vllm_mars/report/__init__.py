"""Counts and reports, on one road from the kernels to Prometheus and to an answer.

    worker    `worker`: what a step did leaves with its ModelRunnerOutput; `counters` holds counts
    core      `core`: counts go on with the scheduler's statistics, reports with their tokens
    server    `metrics`: Prometheus and the log; `answers`: the reports that clients ask for

No message, process or thread is added. `carrier` says what lies on which object of vLLM's.
"""
