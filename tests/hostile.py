"""A hostile client: seeded random requests to every route of a server's OpenAPI schema.

Half of the requests are valid, the others break a rule. Clients disconnect at any time, while the
server pauses, aborts requests and resets its cache.
"""

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx

from kept import MARK
from vllm_mars.options import requests
from vllm_mars.servers.server import VllmServer

# Routes that are not requests to the model; new routes are included.
EXCLUDED_ROUTES = ("weight", "elastic", "token")
AT_ONCE = 16
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
SECONDS = 300.0
SHOWN = 400
# Values that a type, a kernel or a parser cannot hold.
EXTREMES = (
    *(1e39, 1e308, 10**400, -(10**30), 2**63, 2**31, -1, -0.0, 5e-324, float("nan"), float("inf")),
    *(True, None, "0.1", "", "\x00", "\ud83d\ude00" * 9, "w5 " * 300, "x" * 65536, [], [[]], {}),
    *({"a": {"b": [1]}}, {"k" * 65536: 1}),
)
# Text of requests or errors that vLLM also fails without MARS, with vLLM's issue.
VLLM_FAILURES = {
    "object has no attribute 'get'": "vLLM #44537: structured_outputs is no object",
    "%llguidance": "vLLM #43920: a grammar of another backend than the engine has begun with",
}
GRAMMAR = {"grammar": "%llguidance {}\nstart: /[a-z]+/"}
# Requests that the schema rarely leads to: vLLM ends them itself, or splits them.
RARE = (
    {"structured_outputs": GRAMMAR, "vllm_xargs": {requests.RETURN: True}},
    {"use_beam_search": True, "n": 2},
)
# vLLM breaks the connection if it refuses a request after its /v1/responses stream has begun, also
# without MARS: vLLM #22341, #40418.
BREAKS_OFF = "/v1/responses"
SENSIBLE = (0, 0, 0.001, 0.02, 0.1, 1, 1.0, True, False)
SCOPES = ("all", "thinking", "answer")
PLAIN = {
    "model": "model",
    "messages": [{"role": "user", "content": "w5 w6 w7 w5 w6"}],
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
}


class HarmError(Exception):
    """A client has harmed the server."""


class Client:
    """Sends random requests to a server named "model" in vLLM's development mode."""

    def __init__(self, server: VllmServer, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.http = self.connect()
        self.answered: Counter[tuple[str, int | str]] = Counter()
        self.sent: list[str] = []
        self.failed: list[str] = []

    async def begin(self) -> None:
        """Reads the schema and sends the plain request that is repeated after each burst."""
        schema = (await self.http.get("/openapi.json")).json()
        self.schemas = schema["components"]["schemas"]
        self.bodies = {
            path: post["requestBody"]["content"]["application/json"]["schema"]
            for path, methods in schema["paths"].items()
            if "requestBody" in (post := methods.get("post", {}))
            and not any(word in path for word in EXCLUDED_ROUTES)
        }
        self.plain = await self.ask_plainly()
        # The engine's grammar backend is xgrammar from here on.
        await self.ask_plainly(structured_outputs={"regex": "[a-z]+"})

    def connect(self) -> httpx.AsyncClient:
        """One connection per request: the server may close an open one as the next is sent."""
        limits = httpx.Limits(max_keepalive_connections=0)
        url = self.server.base_url
        return httpx.AsyncClient(base_url=url, timeout=SECONDS, trust_env=False, limits=limits)

    def counts(self) -> dict[str, int]:
        """Number of requests by route and status."""
        return {
            f"{path} {answer}": n for (path, answer), n in sorted(self.answered.items(), key=str)
        }

    async def run(self, until: float) -> None:
        """Sends burst after burst until a time of the monotonic clock."""
        while time.monotonic() < until:
            await self.burst()

    async def burst(self) -> None:
        """Sends requests and operator actions at once, then the plain request.

        Raises:
            HarmError: the server ended, hangs, fails a request, or gives another plain answer.
        """
        self.sent.clear()
        try:
            await asyncio.gather(*(self.request() for _ in range(AT_ONCE)), self.operate())
            plain = await self.ask_plainly()
        except (httpx.HTTPError, KeyError) as error:
            sent = "\n".join((*self.failed, *self.sent))
            raise HarmError(f"{error!r} after\n{sent}\n{self.server.log_tail()}") from error
        if self.failed:
            raise HarmError("the server failed with\n" + "\n".join(self.failed))
        if plain != self.plain:
            sent = "\n".join(self.sent)
            raise HarmError(f"{plain} is not the former answer, {self.plain}, after\n{sent}")

    async def look_for_leaks(self) -> None:
        """Waits until nothing runs; raises HarmError if objects of ended requests are left."""
        deadline = time.monotonic() + SECONDS
        while left := {n: v for n, v in self.server.metrics().items() if n in RUNNING and v}:
            if time.monotonic() > deadline:
                raise HarmError(f"requests are left after {SECONDS:g} s without load: {left}")
            await asyncio.sleep(0.2)
        # A step holds its requests until the next step.
        await self.ask_plainly()
        answer = await self.http.post("/collective_rpc", json={"method": "kept"})
        if leaked := answer.json()["results"][0]:
            raise HarmError(f"the engine holds objects of ended requests: {leaked}")
        # vLLM's front end may hold the request of its last error; a leak would hold hundreds.
        leaked = (await self.http.get("/kept")).json()
        if sum(leaked.values()) > AT_ONCE:
            raise HarmError(f"the front end holds objects of ended requests: {leaked}")

    async def ask_plainly(self, **options: Any) -> str:
        answer = await self.http.post("/v1/chat/completions", json=PLAIN | options)
        return str(answer.json()["choices"][0]["message"]["content"])

    async def request(self) -> None:
        """Sends a random request, and may disconnect before its answer."""
        path = self.rng.choice(sorted(self.bodies))
        body = self.body(path)
        content = json.dumps(body)
        self.sent.append(f"{path} {content[:SHOWN]}")
        leave = self.rng.choice((None, None, None, 0.02, 0.1, 0.3))
        answered: int | str = "left"
        try:
            async with asyncio.timeout(leave):
                headers = {"content-type": "application/json"}
                answer = await self.http.post(path, content=content, headers=headers)
            # A stream that has begun reports its failure in the text.
            is_failed = answer.status_code == 500 or '"InternalServerError"' in answer.text
            answered = 500 if is_failed else answer.status_code
            if is_failed and not any(words in content + answer.text for words in VLLM_FAILURES):
                self.failed.append(f"{path} {content[:SHOWN]}\n    {answer.text[:SHOWN]}")
        except TimeoutError:
            pass
        except (httpx.RemoteProtocolError, httpx.ReadError):
            if path != BREAKS_OFF:
                raise
            answered = "broken"
        self.answered[path, answered] += 1

    async def operate(self) -> None:
        """Pauses the server, aborts its requests or resets its cache, and resumes."""
        await asyncio.sleep(self.rng.random() / 5)
        action = self.rng.choice(
            (
                "/pause?mode=abort",
                "/pause?mode=keep",
                "/pause?mode=wait",
                "/abort_requests",
                "/reset_prefix_cache?reset_running_requests=true",
                "/reset_prefix_cache",
            )
        )
        acting = asyncio.ensure_future(self.http.post(action, json={}))
        await asyncio.sleep(self.rng.random() / 5)
        answers = [await self.http.post("/resume"), await acting]
        # The action may have paused the server after the first resume.
        self.answered[action.split("?")[0], answers[1].status_code] += 1
        await self.http.post("/resume")

    def body(self, path: str) -> Any:
        """Body of a request, with the fields that the route needs and random ones."""
        schema = self.resolved(self.bodies[path])
        fields = schema["properties"]
        body = {name: value for name, value in self.needed().items() if name in fields}
        if "input" in body:
            # The prompt of these routes is the name of a template.
            body.pop("prompt", None)
        if fields.get("messages", {}).get("items", {}).get("type") == "array":
            body["messages"] = [body["messages"]] * 2
        body |= {n: self.value(fields[n]) for n in schema.get("required", ()) if n not in body}
        for name in self.rng.sample(sorted(fields), self.rng.choice((0, 1, 1, 2, 3, 6))):
            body[name] = self.value(fields[name])
        if self.rng.random() < 0.2:
            rare = self.rng.choice(RARE).items()
            body |= {name: value for name, value in rare if name in fields}
        if "vllm_xargs" in fields and self.rng.random() < 0.6:
            keys = self.rng.sample(sorted(requests._KEYS), self.rng.choice((1, 1, 2)))
            values = SENSIBLE if self.rng.random() < 0.6 else EXTREMES
            special = {"mars_scope": SCOPES} if values is SENSIBLE else {}
            body["vllm_xargs"] = {key: self.rng.choice(special.get(key, values)) for key in keys}
        if "request_id" in fields:
            body["request_id"] = "".join((*MARK, str(self.rng.random())))
        return body

    def needed(self) -> dict[str, Any]:
        """Values of the fields that a valid request needs, for any route."""
        words = [f"w{self.rng.randint(5, 90)}" for _ in range(self.rng.randint(1, 9))]
        text = " ".join(words * self.rng.choice((1, 2, 2, 9)))
        messages = [{"role": "user", "content": text}]
        tokens = self.rng.choice((1, 2, 5, 24, 48, 48))
        return {
            "model": "model",
            "input": text,
            "prompt": text,
            "messages": messages,
            "query": text,
            "items": words[:3],
            "label_token_ids": [5, 6, 7],
            "state": text,
            "max_tokens": tokens,
            "max_output_tokens": tokens,
            "temperature": self.rng.choice((0, 0, 1)),
            "stream": self.rng.random() < 0.3,
            "ignore_eos": True,
        }

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Follows references and picks among alternatives at the top of a schema."""
        while True:
            if "$ref" in schema:
                schema = self.schemas[schema["$ref"].rpartition("/")[2]]
            elif choices := schema.get("anyOf") or schema.get("oneOf"):
                schema = self.rng.choice(choices)
            else:
                return schema

    def value(self, schema: Any) -> Any:
        """A value that a schema allows, or with a probability of 5% an extreme one."""
        if not isinstance(schema, dict) or self.rng.random() < 0.05:
            return self.rng.choice(EXTREMES)
        schema = self.resolved(schema)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else self.rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object":
            fields, required = schema.get("properties", {}), schema.get("required", ())
            values = {
                name: self.value(field)
                for name, field in fields.items()
                if name in required or self.rng.random() < 0.2
            }
            additional = schema.get("additionalProperties")
            if additional and self.rng.random() < 0.5:
                values[self.rng.choice(("5", "w5", "k" * 65536))] = self.value(additional)
            return values
        if kind == "array":
            return [self.value(schema.get("items")) for _ in range(self.rng.choice((0, 1, 2)))]
        if kind == "string":
            return self.rng.choice(("w5", "w5 w6 w5", "", "[", "\x00", "auto", "text", "w6 " * 40))
        least, most = schema.get("minimum", 0), schema.get("maximum", 9)
        if kind == "integer":
            return self.rng.choice((0, 1, 2, 5, 5, 40, int(least), int(most)))
        if kind == "number":
            return self.rng.choice((0, 0.3, 0.9, 1, 1.5, least, most))
        if kind == "boolean":
            return self.rng.random() < 0.5
        return None if kind == "null" else self.rng.choice(EXTREMES)
