"""The knobs of task=serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option
from minivllm.platform.plug_ins import names_class
from minivllm.platform.threads import wanted_cores


@option("minivllm.tasks.serve.run")
@dataclass(frozen=True)
class ServeOptions(Options):
    """task=serve.

    Args:
        host: the address to listen on; the default is reached from this machine only.
        port: the port to listen on; 0 takes a free one.
        served_model_name: the name that clients ask for; null: that of the model.
        api_keys: keys that clients must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`;
            none: every client is served.
        allowed_hosts: names by which clients may call a server without keys, beside those of this
            machine and the address that it listens on; "*" any.
        cors_origins: web pages of these origins may call the server, "*" all.
        max_num_queued_reqs: most completions that wait for their first token, of which a request
            with n=4 has four; more are refused (429).
        max_num_queued_tokens: most tokens of their prompts.
        max_body_mb: largest body of a request, in 10**6 bytes.
        max_depth: most levels of brackets in a body.
        max_socket_reqs: most requests under way on one WebSocket.
        request_timeout_s: longest time of a request, from its arrival to its last token.
        step_timeout_s: longest time of one step of an engine, after which its process counts as one
            that hangs, and is ended. Compiling in a first step and long prompts count.
        keep_alive_s: how long an idle connection stays open.
        client_timeout_s: longest time for a client to send the head of a request, or its body, or
            to take what was written to it.
        slow_reader_pieces: most tokens that wait for a client that does not read; beyond them its
            request ends and its connection is closed.
        drain_s: after SIGTERM, how long running requests may go on; and those of a replica that is
            taken away, before another one goes on with them.
        view: show the engine at work to those who open the server's address in a browser.
        view_load: viewers may have the server send itself requests of random tokens; null: they may
            where no key is set and the server listens on this machine only.
        metrics_prefix: of the names in /metrics; "vllm" keeps boards made for vLLM working.
        log_prompts: write prompts and answers to the log, too.
        api_server_count: processes that answer clients; with more than one they are beside the
            process that has the engines, and share its socket.
        cores: cores of the processes that answer clients, in the syntax of taskset; the engine's
            are `runtime.cores`.
        record: write a record of the served requests to runs/ at the end.
        endpoints: endpoints of the user's own, each a dictionary with `_target_`, a class with
            `router(service)`, and its knobs.
    """

    group = "task"
    host: str = "127.0.0.1"
    port: int = knob(8000, at_least=0, at_most=65535)
    served_model_name: str | None = None
    api_keys: list[str] = field(default_factory=list)
    allowed_hosts: list[str] = knob(factory=list, unasked=True)
    cors_origins: list[str] = field(default_factory=list)
    max_num_queued_reqs: int = knob(256, at_least=1)
    max_num_queued_tokens: int = knob(262144, at_least=1)
    max_body_mb: float = knob(8.0, above=0)
    max_depth: int = knob(64, at_least=4)
    max_socket_reqs: int = knob(64, at_least=1)
    request_timeout_s: float = knob(600.0, above=0)
    step_timeout_s: float = knob(600.0, above=0, unasked=True)
    keep_alive_s: float = knob(30.0, above=0)
    client_timeout_s: float = knob(30.0, above=0)
    slow_reader_pieces: int = knob(1024, at_least=1)
    drain_s: float = knob(30.0, at_least=0)
    view: bool = knob(True, unasked=True)
    view_load: bool | None = knob(None, unasked=True)
    metrics_prefix: Literal["minivllm", "vllm"] = "minivllm"
    log_prompts: bool = False
    api_server_count: int = knob(1, at_least=1, at_most=64)
    cores: str | None = knob(None, unasked=True)
    record: bool = False
    endpoints: list[dict[str, Any]] = knob(factory=list, unasked=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted_cores({"cores": self.cores}, "task")
        if not all(map(names_class, self.endpoints)):
            raise self.bad(
                "endpoints",
                "must be a list of {_target_: my_package.MyEndpoint, ...}, knobs beside",
            )

    @property
    def allows_load(self) -> bool:
        """Whether viewers may have the server send itself requests."""
        if self.view_load is not None:
            return self.view_load
        return not self.api_keys and not self.record and is_loopback(self.host)

    @property
    def allows_commands(self) -> bool:
        """Whether clients may change the server: they have keys, or are on this machine."""
        return bool(self.api_keys) or is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether this name or address is that of the machine itself."""
    name = host.strip("[]").lower().rstrip(".")
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
