"""LLM: the Python face of the engine."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minivllm.assembly import build_engine
from minivllm.config.compose import compose, conf_dir, given_knobs, quoted
from minivllm.engine.engine import Engine, TokenOutput
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request, RequestState
from minivllm.engine.tokenizer import Detokenizer
from minivllm.errors import BadInput, nearest
from minivllm.extras.beam import BeamSearch
from minivllm.extras.scoring import sequence_logits
from minivllm.models.load.generation import described, unset_defaults
from minivllm.outputs import CompletionOutput, RequestOutput, StreamPiece
from minivllm.platform.loading_bar import LoadingBar
from minivllm.prompts import Message, Prompt, as_batch, conversations, text_or_ids

if TYPE_CHECKING:
    from torch import Tensor


def params_of(knobs: Mapping[str, Any]) -> SamplingParams:
    """The decoding parameters of a configuration's group `decoding`."""
    return SamplingParams(**{name: value for name, value in knobs.items() if name != "_target_"})


def check_streamable(params: SamplingParams) -> None:
    """Raise BadInput where these ask for more than one stream of tokens can carry."""
    if params.n != 1 or params.prompt_logprobs is not None:
        raise BadInput(
            "a stream is one completion: decoding.n must be 1 and decoding.prompt_logprobs null"
        )
    if params.beam_width != 1:
        raise BadInput(
            "a beam search knows its tokens at its end and cannot be streamed: "
            "decoding.beam_width must be 1, or use generate"
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
        folders = [conf_dir(), *([] if config_dir is None else [Path(config_dir)])]
        # os.path's functions are False for what no file can be named, such as 300 characters.
        if any(os.path.isfile(folder / "model" / f"{model}.yaml") for folder in folders):
            chosen = [f"model={model}"]
        else:
            chosen = ["model=hf", f"model.path={quoted(model)}"]
        chosen += [f"{group}={option}" for group, option in groups.items()]
        config = compose([*chosen, f"runtime.device={device}", *overrides], config_dir)
        try:
            self._start(
                {**config, "decoding_given": given_knobs("decoding", [*chosen, *overrides])}
            )
        except BadInput as error:
            hint = nearest(model, [path.stem for path in (conf_dir() / "model").glob("*.yaml")])
            if (
                "model=hf" not in chosen
                or os.path.exists(model)
                or not hint.startswith("did you mean")
            ):
                raise
            raise BadInput(f"{error}; {hint}") from error

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LLM:
        """An LLM of a configuration that is already composed. Of `decoding` all counts as set,
        unless `decoding_given` names the knobs that are."""
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
        # What the checkpoint says of decoding parameters that nobody has set.
        self.checkpoint_defaults = unset_defaults(
            config["decoding"], config.get("decoding_given"), self.engine.loaded.decoding_defaults
        )
        self._told_of_defaults = False
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
            prompts: texts or lists of token ids; see prompts.py for the forms that these may have.
            params: one for all, or one a prompt; None takes the configuration's `decoding`.

        Returns:
            One output a prompt, in order.

        Raises:
            BadInput: a prompt cannot be served, or its masks leave no token; nothing is returned
                then.
            Exception: what a `token_mask` raises. Other requests go on.
        """
        batch = [text_or_ids(prompt) for prompt in as_batch(prompts)]
        if isinstance(params, Sequence):
            if len(params) != len(batch):
                raise BadInput(
                    f"{len(batch)} prompts and {len(params)} SamplingParams; give one, or one a "
                    "prompt"
                )
            chosen = list(params)
        else:
            chosen = [params or self.get_default_sampling_params()] * len(batch)
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
                streams = (first,) if first.is_joint else (first, *first.unstarted)
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
            if isinstance(request.group, BeamSearch) and request.group.hypotheses:
                result.outputs = self._beams(request, request.group)
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        Args:
            messages: {"role": ..., "content": ...} in order, or a list of such conversations.
            params: as for `generate`.
            add_generation_prompt: end the prompt where the assistant speaks.
            tools: given to the chat template.
            chat_template_kwargs: further variables of the chat template, such as enable_thinking;
                they go before the two above.

        Returns:
            One output a conversation, in order; `prompt` is the text that the chat template made.

        Raises:
            BadInput: there is no tokenizer or chat template, or it refuses the messages; and as
                `generate`.
        """
        if self.tokenizer is None:
            raise BadInput(
                "this checkpoint has no tokenizer: it cannot chat; give token ids to generate"
            )
        variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        variables |= {} if tools is None else {"tools": list(tools)}
        variables |= chat_template_kwargs or {}
        if "messages" in variables or not all(isinstance(name, str) for name in variables):
            raise BadInput("chat_template_kwargs must have names of variables, and not messages")
        texts = [self.tokenizer.chat_text(one, **variables) for one in conversations(messages)]
        outputs = self.generate([self.tokenizer.encode(text, False) for text in texts], params)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def _tell_of_equal_noise(self, params: Sequence[SamplingParams]) -> None:
        """Warn, once, that prompts draw with one seed."""
        seeds = [one.seed for one in params if one.seed is not None and not one.greedy]
        if len(set(seeds)) < len(seeds) and not self._told_of_equal_noise:
            self._told_of_equal_noise = True
            warnings.warn(
                "several prompts have the same seed, so they draw with the same noise; give "
                "each SamplingParams a seed of its own, or none (told once)",
                stacklevel=3,
            )

    def _beams(self, request: Request, search: BeamSearch) -> list[CompletionOutput]:
        """The outputs of a beam search, the best first."""
        outputs = []
        for index, hypothesis in enumerate(search.hypotheses):
            text, shown = None, hypothesis.token_ids
            if self.tokenizer is not None:
                if (
                    hypothesis.finish_reason == "stop"
                    and not request.params.include_stop_str_in_output
                ):
                    shown = shown[:-1]
                prompt = request.token_ids[: request.num_prompt_tokens]
                detokenizer = Detokenizer(
                    self.tokenizer, prompt, request.params.skip_special_tokens
                )
                text = "".join(map(detokenizer.push, shown)) + detokenizer.finish()
            outputs.append(
                CompletionOutput(
                    index,
                    text,
                    hypothesis.token_ids,
                    finish_reason=hypothesis.finish_reason,
                    cumulative_logprob=hypothesis.cumulative_logprob,
                    score=hypothesis.score,
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

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[StreamPiece]:
        """Complete one prompt, a piece a token; closing the iterator ends the request.

        Several streams may be open at once: each step of the engine serves all of them.

        Raises:
            BadInput: the prompt cannot be served, the LLM is closed, or `n`, `beam_width` or
                `prompt_logprobs` ask for more than one stream of tokens can carry.
        """
        params = params or self.get_default_sampling_params()
        check_streamable(params)
        pieces = self._stream(self._submit(self.encode(prompt), params))
        next(pieces)
        return pieces

    def _stream(self, request: Request) -> Generator[StreamPiece]:
        """The pieces of a request, after an empty one: an iterator that was never begun would not
        end the request."""
        try:
            yield StreamPiece(None, "", None)
            while request.state is not RequestState.DONE or self._outputs[request.request_id]:
                if not self._outputs[request.request_id]:
                    self._step()
                for output in self._take(request.request_id):
                    if request.error is not None:
                        raise request.error
                    yield StreamPiece(
                        output.token_id, output.text, output.finish_reason, output.logprobs
                    )
            if request.finish_reason == "abort":
                yield StreamPiece(None, "", "abort")
        finally:
            self._forget(request.request_id)

    def logits(self, prompt: Prompt) -> Tensor:
        """Logits of every position: float32 [tokens, vocab]."""
        return sequence_logits(self._opened(), self.encode(prompt))

    @property
    def default_params(self) -> SamplingParams:
        """The decoding parameters of the configuration, and of the checkpoint's
        generation_config.json where the user has set neither an option of `decoding` nor that
        knob."""
        return params_of({**self.config["decoding"], **self.checkpoint_defaults})

    def get_default_sampling_params(self) -> SamplingParams:
        """See `default_params`; warns, once, of what the checkpoint decides."""
        if self.checkpoint_defaults and not self._told_of_defaults:
            self._told_of_defaults = True
            warnings.warn(f"{self.defaults_note()} (told once)", stacklevel=3)
        return self.default_params

    def defaults_note(self) -> str:
        """A line about `checkpoint_defaults`; empty where there are none."""
        settings = described(self.checkpoint_defaults)
        return (
            settings
            and f"the model's generation_config.json decides {settings}, since decoding does not; "
            "decoding=greedy would"
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            BadInput: it is text and the checkpoint has no tokenizer, or it is neither text nor ids.
        """
        prompt = text_or_ids(prompt)
        if not isinstance(prompt, str):
            return prompt
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
        for one in (request,) if request.is_joint else (request, *request.unstarted):
            self._outputs[one.request_id] = []
        return request

    def _step(self) -> None:
        """One step of the engine; its tokens wait for whoever asked for them.

        Where it is interrupted, all requests end: others' tokens may be lost with it, and they
        would wait for ever.
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

    def close(self) -> None:
        """Release model and cache. The LLM cannot be used afterwards."""
        if "engine" in self.__dict__:
            self.__dict__.pop("engine").close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
