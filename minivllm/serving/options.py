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
    """task=serve."""

    group = "task"
    host: str = "127.0.0.1"
    """Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for all."""
    port: int = knob(8000, at_least=0, at_most=65535)
    """Port to listen on; 0: a free one."""
    served_model_name: str | None = None
    """Name that clients ask for; null: the name of the model."""
    api_keys: list[str] = field(default_factory=list)
    """Keys that clients must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`, such as
    ['${oc.env:MINIVLLM_API_KEY}']; []: every client is served."""
    allowed_hosts: list[str] = knob(factory=list, unasked=True)
    """Names by which clients may call a server without keys, as of a proxy before it, beside this
    machine's; ['*'] for any."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins whose web pages may call the server; ['*'] for all."""
    max_num_queued_reqs: int = knob(256, at_least=1)
    """Completions waiting for their first token (n a prompt); more are refused with 429."""
    max_num_queued_tokens: int = knob(262144, at_least=1)
    """Most tokens of their prompts."""
    max_body_mb: float = knob(8.0, above=0)
    """Largest body of a request, 10^6 bytes."""
    max_depth: int = knob(64, at_least=4)
    """Levels of brackets in a body."""
    max_socket_reqs: int = knob(64, at_least=1)
    """Requests under way on one WebSocket."""
    request_timeout_s: float = knob(600.0, above=0)
    """Longest time of a request, from its arrival to its last token."""
    step_timeout_s: float = knob(600.0, above=0, unasked=True)
    """Longest time of one step of an engine, compiling included, after which its process counts as
    one that hangs, and is ended."""
    keep_alive_s: float = knob(30.0, above=0)
    """How long an idle connection stays open."""
    client_timeout_s: float = knob(30.0, above=0)
    """Longest time for a client to send a head or a body, or to take what was written."""
    slow_reader_pieces: int = knob(1024, at_least=1)
    """Tokens that wait for a client that does not read, before it is cut off."""
    drain_s: float = knob(30.0, at_least=0)
    """Longest time after SIGTERM for running requests, and for those of a replica that is
    removed."""
    view: bool = knob(True, unasked=True)
    """The server's address, in a browser, shows the engine at work."""
    view_load: bool | None = knob(None, unasked=True)
    """Viewers may have the server send itself requests of random tokens; null: without keys, on
    this machine only."""
    metrics_prefix: Literal["minivllm", "vllm"] = "minivllm"
    """Prefix of the names in /metrics; vllm keeps boards made for vLLM working."""
    log_prompts: bool = False
    """Write prompts and answers to the log, too."""
    api_server_count: int = knob(1, at_least=1, at_most=64)
    """Processes that answer clients, in front of the same engines."""
    cores: str | None = knob(None, unasked=True)
    """Cores of the processes that answer clients, such as 1 or 2-3; the engine's are
    runtime.cores."""
    record: bool = False
    """Write a record of the served requests at the end."""
    endpoints: list[dict[str, Any]] = knob(factory=list, unasked=True)
    """Endpoints of your own: a list of {_target_: my_package.MyEndpoint, ...}.
    docs/guides/your-own-endpoint.md."""

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
