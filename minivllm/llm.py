"""LLM: the Python face of the engine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minivllm.assembly import build_engine
from minivllm.config import compose, conf_dir, quoted
from minivllm.engine.engine import Engine, TokenOutput
from minivllm.engine.params import SamplingParams
from minivllm.engine.request import Request, RequestState
from minivllm.engine.tokenizer import Detokenizer
from minivllm.errors import BadInput
from minivllm.loading_bar import LoadingBar

if TYPE_CHECKING:
    from torch import Tensor

Prompt = str | list[int]


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str | None = None  # None without a tokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None  # one a token: token id -> natural log
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "shed" (too late for its deadline)
    stop_reason: int | str | None = (
        None  # the stop string or token id that ended it; None for the model's own end
    )
    cumulative_logprob: float | None = None  # of a beam: natural log of its probability
    score: float | None = None  # of a beam: cumulative_logprob / (tokens ** length_penalty)


@dataclass
class RequestMetrics:
    """Times of one prompt, in seconds from the call."""

    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass
class RequestOutput:
    """A prompt and its completions."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float]] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(frozen=True)
class StreamPiece:
    """One token of a streamed completion; the last piece has none where the request was ended without one."""

    token_id: int | None
    text: str
    finish_reason: str | None
    logprobs: dict[int, float] | None = None


def params_of(knobs: Mapping[str, Any]) -> SamplingParams:
    """The decoding parameters of a configuration's group `decoding`."""
    return SamplingParams(**{name: value for name, value in knobs.items() if name != "_target_"})


def check_streamable(params: SamplingParams) -> None:
    """Raise BadInput where these ask for more than one stream of tokens can carry."""
    if params.n != 1 or params.prompt_logprobs is not None:
        raise BadInput("a stream is one completion: decoding.n must be 1 and decoding.prompt_logprobs null")
    if params.beam_width != 1:
        raise BadInput(
            "a beam search knows its tokens at its end and cannot be streamed: decoding.beam_width must be 1, "
            "or use generate"
        )


class LLM:
    """Generate with one model and one engine configuration.

        with LLM("tiny", quant="int8", overrides=["cache.block_size=32"]) as llm:
            print(llm.generate("def main():", SamplingParams(max_tokens=32))[0].outputs[0].text)

    Args:
        model: a name from conf/model, a checkpoint folder or a hub id.
        device: "auto", "cpu" or "cuda".
        overrides: Hydra overrides, as on the command line.
        config_dir: a further folder of option files.
        groups: any other config group by name: quant, attention, cache, batching, ...

    Raises:
        BadInput: an option or the checkpoint is wrong, or a host cannot hold the weights.
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        device: str = "auto",
        overrides: Sequence[str] = (),
        config_dir: str | Path | None = None,
        **groups: str,
    ) -> None:
        own = config_dir is not None and (Path(config_dir) / "model" / f"{model}.yaml").is_file()
        if own or (conf_dir() / "model" / f"{model}.yaml").is_file():
            chosen = [f"model={model}"]
        else:
            chosen = ["model=hf", f"model.path={quoted(model)}"]
        chosen += [f"{group}={option}" for group, option in groups.items()]
        config = compose([*chosen, f"runtime.device={device}", *overrides], config_dir)
        self._start(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LLM:
        """An LLM of a configuration that is already composed."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: dict[str, Any]) -> None:
        if config["runtime"]["profile"]:
            raise BadInput(
                "runtime.profile=true is for task=bench, whose measurement it traces: leave it out"
            )
        self.config = config
        try:
            with LoadingBar() as bar:
                self.engine = build_engine(config, bar)
        except MemoryError as error:
            raise BadInput(str(error) or "there is not enough memory for the weights") from error
        self.tokenizer = self.engine.tokenizer
        self._counter = 0
        self._told_of_equal_noise = False
        self._outputs: dict[str, list[TokenOutput]] = {}  # by request, until they are taken

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; they run together as the batching policy allows.

        Args:
            prompts: texts or lists of token ids.
            params: one for all, or one a prompt; None takes the configuration's `decoding`.

        Returns:
            One output a prompt, in order.

        Raises:
            BadInput: a prompt cannot be served, or its masks leave no token; nothing is returned then.
            Exception: what a `token_mask` raises. Other requests go on.
        """
        batch = self._as_batch(prompts)
        if isinstance(params, Sequence):
            if len(params) != len(batch):
                raise BadInput(
                    f"{len(batch)} prompts and {len(params)} SamplingParams; give one, or one a prompt"
                )
            chosen = list(params)
        else:
            chosen = [params or self.default_params] * len(batch)
        self._tell_of_equal_noise(chosen)
        started = time.perf_counter()
        results: list[RequestOutput] = []
        owners: dict[str, tuple[RequestOutput, CompletionOutput]] = {}
        firsts: list[Request] = []
        try:
            for prompt, one in zip(batch, chosen, strict=True):
                ids = self.encode(prompt)
                result = RequestOutput(prompt if isinstance(prompt, str) else None, ids, [])
                results.append(result)
                first = self._submit(ids, one)
                firsts.append(first)
                streams = (first,) if first.fellows else (first, *first.siblings)
                for index, request in enumerate(streams):
                    completion = CompletionOutput(
                        index,
                        text=None if self.tokenizer is None else "",
                        logprobs=None if one.logprobs is None else [],
                    )
                    result.outputs.append(completion)
                    owners[request.request_id] = (result, completion)
            unfinished = set(owners)
            while unfinished:
                self._step()
                for request_id in list(unfinished):
                    for output in self._take(request_id):
                        if output.request.error is not None:
                            raise output.request.error
                        self._collect(output, *owners[request_id], started)
                        if output.finish_reason is not None:
                            unfinished.discard(request_id)
        finally:
            for request_id in owners:
                self._forget(request_id)
        for request, result in zip(firsts, results, strict=True):
            result.prompt_logprobs = request.prompt_logprobs
            if request.hypotheses:
                result.outputs = self._beams(request)
        return results

    def _tell_of_equal_noise(self, params: Sequence[SamplingParams]) -> None:
        """Warn, once, that prompts draw with one seed."""
        seeds = [one.seed for one in params if one.seed is not None and not one.greedy]
        if len(set(seeds)) < len(seeds) and not self._told_of_equal_noise:
            self._told_of_equal_noise = True
            warnings.warn(
                "several prompts have the same seed, so they draw with the same noise; give each SamplingParams a seed of "
                "its own, or none (told once)",
                stacklevel=3,
            )

    def _beams(self, request: Request) -> list[CompletionOutput]:
        """The outputs of a beam search, the best first."""
        outputs = []
        for index, found in enumerate(request.hypotheses):
            text, shown = None, found.token_ids
            if self.tokenizer is not None:
                if found.finish_reason == "stop" and not request.params.include_stop_str_in_output:
                    shown = shown[:-1]
                prompt = request.token_ids[: request.num_prompt_tokens]
                detokenizer = Detokenizer(
                    self.tokenizer, (), prompt, skip_special_tokens=request.params.skip_special_tokens
                )
                text = "".join(map(detokenizer.push, shown)) + detokenizer.finish()
            outputs.append(
                CompletionOutput(
                    index,
                    text,
                    found.token_ids,
                    finish_reason=found.finish_reason,
                    cumulative_logprob=found.cumulative_logprob,
                    score=found.score,
                )
            )
        return outputs

    @staticmethod
    def _collect(
        output: TokenOutput, result: RequestOutput, completion: CompletionOutput, started: float
    ) -> None:
        elapsed = time.perf_counter() - started
        completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
        result.metrics.finished_s = elapsed
        if output.token_id is None:
            return
        completion.token_ids.append(output.token_id)
        if completion.text is not None:
            completion.text += output.text
        if completion.logprobs is not None and output.logprobs is not None:
            completion.logprobs.append(output.logprobs)
        if result.metrics.first_token_s is None:
            result.metrics.first_token_s = elapsed

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamPiece]:
        """Complete one prompt, a piece a token; closing the iterator ends the request.

        Several streams may be open at once: each step of the engine serves all of them.

        Raises:
            BadInput: the prompt cannot be served, the LLM is closed, or `n`, `beam_width` or `prompt_logprobs` ask for
                more than one stream of tokens can carry.
        """
        params = params or self.default_params
        check_streamable(params)
        pieces = self._stream(self._submit(self.encode(prompt), params))
        next(pieces)
        return pieces

    def _stream(self, request: Request) -> Generator[StreamPiece]:
        """The pieces of a request, after an empty one: an iterator that was never begun would not end the request."""
        try:
            yield StreamPiece(None, "", None)
            while request.state is not RequestState.DONE or self._outputs[request.request_id]:
                if not self._outputs[request.request_id]:
                    self._step()
                for output in self._take(request.request_id):
                    if request.error is not None:
                        raise request.error
                    yield StreamPiece(output.token_id, output.text, output.finish_reason, output.logprobs)
            if request.finish_reason == "abort":
                yield StreamPiece(None, "", "abort")
        finally:
            self._forget(request.request_id)

    def logits(self, prompt: Prompt) -> Tensor:
        """Logits of every position: float32 [tokens, vocab]."""
        return self._opened().logits(self.encode(prompt))

    @property
    def default_params(self) -> SamplingParams:
        """The decoding parameters of the configuration."""
        return params_of(self.config["decoding"])

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            BadInput: it is text and the checkpoint has no tokenizer.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise BadInput("this checkpoint has no tokenizer.json: give token ids instead of text")
        return self.tokenizer.encode(prompt)

    def _opened(self) -> Engine:
        """The engine; BadInput after `close`."""
        if "engine" not in self.__dict__:
            raise BadInput("this LLM is closed; make another one")
        return self.engine

    def _submit(self, ids: list[int], params: SamplingParams) -> Request:
        request = self._opened().add_request(str(self._counter), ids, params)
        self._counter += 1
        for one in (request,) if request.fellows else (request, *request.siblings):
            self._outputs[one.request_id] = []
        return request

    def _step(self) -> None:
        """One step of the engine; its tokens wait for whoever asked for them.

        Where it is interrupted, all requests end: others' tokens may be lost with it, and they would wait for ever.
        """
        engine = self._opened()
        try:
            outputs = engine.step()
        except BaseException:
            engine.abort_all()
            raise
        for output in outputs:
            self._outputs[output.request.request_id].append(output)

    def _take(self, request_id: str) -> list[TokenOutput]:
        """The tokens of a request that have not been taken yet."""
        taken, self._outputs[request_id] = self._outputs[request_id], []
        return taken

    def _forget(self, request_id: str) -> None:
        """End a request, if it has not ended, and drop what is left of it."""
        if hasattr(self, "engine"):
            self.engine.abort(request_id)
        self._outputs.pop(request_id, None)

    @staticmethod
    def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        if len(prompts) and isinstance(prompts[0], Integral):
            return [list(prompts)]
        return list(prompts)  # type: ignore[arg-type]

    def close(self) -> None:
        """Release model and cache. The LLM cannot be used afterwards."""
        if "engine" in self.__dict__:
            self.__dict__.pop("engine").close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
