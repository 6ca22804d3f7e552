"""An OpenAI-compatible server: chat completions and completions over one engine, with the prefix cache visible.

What a client can see of sharing is `usage.prompt_tokens_details.cached_tokens`; what it can do about it is
`cache_salt`: requests with different salts never share. Sampling is greedy, so a `temperature` other than 0 is
refused rather than ignored, and so is everything else that would change the text and is not offered. Every refusal is
an error object as OpenAI's clients expect it. A client that goes away, streaming or not, aborts its request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from blockmgr import BlockManagerError, Namespace, metrics

from .async_engine import AsyncEngine, DeadlineExceeded, EngineStopped, Overloaded
from .inspect_page import Prompt, picture
from .request import NoRoomLeft, RequestTooLong

MAX_BODY = 2 * 1024 * 1024  # bytes
MAX_EXPLAINED = 32  # waiting prompts that a snapshot explains


T = TypeVar("T")


class Strict(BaseModel):
    """Nothing is coerced, and unknown fields are errors: an option that is ignored is a wrong answer."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: str


class StreamOptions(Strict):
    include_usage: bool = False


class Common(Strict):
    """What both endpoints take."""

    model: str
    max_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, le=0.0)
    n: int = Field(default=1, ge=1, le=1)
    seed: int | None = None
    user: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = ""
    priority: int = 0

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, body: Any) -> Any:
        """JSON can spell half a character (a lone surrogate), in any string; nothing behind this could encode it."""
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise ValueError(f"not text: {error}") from None
        except TypeError:  # no JSON object, which is said elsewhere
            pass
        return body

    @model_validator(mode="after")
    def _used(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


class CompletionRequest(Common):
    prompt: str | list[int]


class Refused(Exception):
    """An answer with an HTTP status; `kind` is OpenAI's error type."""

    def __init__(self, status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, headers or {}


def make_app(front: AsyncEngine, tokenizer: Any, model_name: str, deadline: float | None = 300.0) -> FastAPI:
    """The ASGI application. `front` is started and stopped with it; `deadline` bounds every request, in seconds."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with front:
            yield

    app = FastAPI(title="blockmgr", lifespan=lifespan, docs_url=None, redoc_url=None)
    manager = front.engine.manager
    stop = {tokenizer.eos_token_id} - {None}

    @app.middleware("http")
    async def limit_body(request: Request, call_next: Any) -> Response:
        length = request.headers.get("content-length")
        if request.method == "POST" and (length is None or not length.isdigit()):
            return _error(Refused(411, "invalid_request_error", "a content-length is needed"))
        if length is not None and int(length) > MAX_BODY:
            text = f"the body has {length} bytes, at most {MAX_BODY} are taken"
            return _error(Refused(413, "invalid_request_error", text))
        answer: Response = await call_next(request)
        return answer

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            text = f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
        else:
            text = ": ".join([".".join(map(str, first["loc"][1:])) or "the body", first["msg"]])
        return _error(Refused(400, "invalid_request_error", text))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        # With a cause: the body could not be parsed at all (not UTF-8, nested too deeply).
        text = str(error.detail) if error.__cause__ is None else f"the body is not JSON: {error.__cause__}"
        return _error(Refused(error.status_code, "invalid_request_error", text, dict(error.headers or {})))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus() -> PlainTextResponse:
        text = await look(lambda: metrics.exposition(manager, model_name))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/snapshot")
    async def snapshot(request: Request) -> Response:
        # It shows the token ids and salts of every tenant.
        if request.client is None or not _is_loopback(request.client.host):
            raise Refused(403, "permission_error", "/snapshot answers only clients on the server's own machine")
        shown = await look(lambda: picture(manager, _waiting(front)))
        return Response(await asyncio.to_thread(json.dumps, shown), media_type="application/json")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model_name, "object": "model", "created": 0, "owned_by": "blockmgr"}]}

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        messages = [message.model_dump() for message in body.messages]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        ids = encode(lambda: tokenizer.apply_chat_template(messages, **options))
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        return await serve(request, body, ids, "chat.completion", "chatcmpl-")

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompt = body.prompt
        ids = prompt if isinstance(prompt, list) else encode(lambda: tokenizer(prompt)["input_ids"])
        return await serve(request, body, ids, "text_completion", "cmpl-")

    def encode(tokenize: Callable[[], list[int]]) -> list[int]:
        try:
            return tokenize()
        except Exception as error:  # tokenizers and chat templates raise whatever they like
            raise Refused(400, "invalid_request_error", f"the tokenizer does not take this: {error}") from None

    async def look(read: Callable[[], Any]) -> Any:
        try:
            return await front.between_steps(read)
        except EngineStopped as error:
            raise Refused(503, "server_error", str(error)) from None

    async def serve(request: Request, body: Common, ids: list[int], kind: str, prefix: str) -> Response:
        if body.model != model_name:
            raise Refused(404, "invalid_request_error", f"model {body.model!r} is not served here, {model_name!r} is")
        if not ids:
            raise Refused(400, "invalid_request_error", "the prompt is empty")
        cached = 0

        def admitted(life: Any) -> None:
            nonlocal cached
            cached = life.cached

        tokens = front.generate(
            ids,
            body.max_tokens,
            namespace=Namespace(salt=body.cache_salt),
            stop=stop,
            priority=body.priority,
            deadline=deadline,
            admitted=admitted,
        )
        answer = {"id": prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": model_name}

        def usage(count: int) -> dict[str, Any]:
            return {
                "prompt_tokens": len(ids),
                "completion_tokens": count,
                "total_tokens": len(ids) + count,
                "prompt_tokens_details": {"cached_tokens": cached},
            }

        if body.stream:
            first, done = await _while_connected(request, _first(tokens))  # a refusal is a status, no broken stream
            events = _events(body, tokens, first, done, answer, kind, tokenizer, usage)
            return StreamingResponse(events, media_type="text/event-stream")
        got = await _while_connected(request, _all(tokens))
        text = tokenizer.decode(got, skip_special_tokens=True)
        reason = "length" if len(got) >= body.max_tokens else "stop"
        if kind == "chat.completion":
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        else:
            choice = {"text": text}
        choice |= {"index": 0, "finish_reason": reason, "logprobs": None}
        return JSONResponse(answer | {"choices": [choice], "usage": usage(len(got))})

    return app


def _waiting(front: AsyncEngine) -> list[Prompt]:
    """Requests that are not admitted yet, next ones first."""
    waiting = list(front.engine.scheduler.waiting)[:MAX_EXPLAINED]
    return [Prompt(f"waiting request {request.arrival}", request.ids, request.namespace) for request in waiting]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns the engine's refusals into HTTP statuses."""
    try:
        yield
    except Overloaded as error:
        wait = str(max(1, round(error.retry_after)))
        raise Refused(429, "rate_limit_error", str(error), {"Retry-After": wait}) from None
    except (RequestTooLong, BlockManagerError, ValueError) as error:
        raise Refused(400, "invalid_request_error", str(error)) from None
    except DeadlineExceeded as error:
        raise Refused(504, "timeout_error", str(error)) from None
    except (EngineStopped, NoRoomLeft) as error:
        raise Refused(503, "server_error", str(error)) from None


async def _first(tokens: AsyncIterator[int]) -> tuple[int, bool]:
    """(first token, False), or (0, True) if there is none. Raises Refused."""
    with _refusals():
        try:
            return await anext(tokens), False
        except StopAsyncIteration:
            return 0, True


async def _all(tokens: Any) -> list[int]:
    """Every token. Raises Refused."""
    with _refusals():
        async with aclosing(tokens):
            return [token async for token in tokens]


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. It is cancelled as soon as the client goes away; raises Refused then, which nobody reads."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(499, "invalid_request_error", "the client went away")
        return await working
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait((working, gone))


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    body: Common,
    tokens: Any,
    first: int,
    done: bool,
    answer: dict[str, Any],
    kind: str,
    tokenizer: Any,
    usage: Any,
) -> AsyncIterator[str]:
    """Server-sent events: one chunk whenever the text grew by whole characters, then the reason, then [DONE]."""
    chat = kind == "chat.completion"
    answer = answer | {"object": "chat.completion.chunk"} if chat else answer
    got: list[int] = []
    sent = ""

    def chunk(text: str | None, reason: str | None) -> str:
        part: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if chat:
            part["delta"] = {} if text is None else {"role": "assistant", "content": text}
        else:
            part["text"] = text or ""
        return f"data: {json.dumps(answer | {'choices': [part]})}\n\n"

    try:
        async with aclosing(tokens):
            pending = [] if done else [first]
            while pending or not done:
                if not pending:
                    try:
                        pending.append(await anext(tokens))
                    except StopAsyncIteration:
                        break
                got.append(pending.pop())
                text = tokenizer.decode(got, skip_special_tokens=True)
                if not text.endswith("�"):  # a character that is not complete yet
                    yield chunk(text[len(sent) :], None)
                    sent = text
        rest = tokenizer.decode(got, skip_special_tokens=True)[len(sent) :]
        if rest:
            yield chunk(rest, None)
        yield chunk(None, "length" if len(got) >= body.max_tokens else "stop")
    except (DeadlineExceeded, EngineStopped, NoRoomLeft) as error:
        yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'server_error'}})}\n\n"
    if body.stream_options is not None and body.stream_options.include_usage:
        yield f"data: {json.dumps(answer | {'choices': [], 'usage': usage(len(got))})}\n\n"
    yield "data: [DONE]\n\n"


def _error(error: Refused) -> JSONResponse:
    body = {"error": {"message": str(error), "type": error.kind, "param": None, "code": None}}
    return JSONResponse(body, status_code=error.status, headers=error.headers)
