"""The class `LLM`, which runs the engine from Python: generate, chat, stream."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.config.groups import LLM_GROUPS, LLM_ROOT, Config, conf_dir
from minivllm.config.overrides import given_knobs, model_overrides, written
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.errors import BadInput, meant
from minivllm.extras.scoring import sequence_logits
from minivllm.models.load.generation import described, unset_defaults
from minivllm.models.vision.inputs import RequestInputs
from minivllm.outputs import (
    CompletionOutput,
    OnError,
    RequestOutput,
    beam_completions,
    check_on_error,
    new_completions,
    report_errors,
)
from minivllm.passes.determinism import close_engine
from minivllm.platform.progress_bar import ProgressBar
from minivllm.prompts import (
    Message,
    Prompt,
    as_batch,
    check_streamable,
    conversations,
    images_of,
    params_of,
    params_of_each,
    template_variables,
    text_or_ids,
)
from minivllm.streams import EngineRequests, Stream

if TYPE_CHECKING:
    from torch import Tensor

    from minivllm.extras.beam import BeamSearch
    from minivllm.extras.vision.pictures import Pictures

# By request id: the output of a prompt, and the completion of it that the request makes.
Completions = dict[str, tuple[RequestOutput, CompletionOutput]]
EncodedPrompt = tuple[str | None, list[int], RequestInputs | None]  # text, token ids, images


class LLM:
    """Generate with one model and one engine configuration.

        with LLM("tiny", quant="int8", overrides=["cache.block_size=32"]) as llm:
            print(llm.generate("def main():", SamplingParams(max_tokens=32))[0].outputs[0].text)

    Its configuration is `config`. What a run has besides an engine, such as `measure`, is there
    only where an override names it or an option takes a value from it.

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
        **groups: Any,
    ) -> None:
        chosen = model_overrides(model, config_dir)
        # Another value than a name is of a setting that other tools have, which the error names.
        chosen += [
            f"{group}={option if isinstance(option, str) else written(option)}"
            for group, option in groups.items()
        ]
        chosen += [f"runtime.device={device}", *overrides]
        config = _composed(chosen, config_dir)
        try:
            self._start({**config, "decoding_given": given_knobs("decoding", chosen)})
        except BadInput as error:
            question = meant(model, [path.stem for path in (conf_dir() / "model").glob("*.yaml")])
            if "model=hf" not in chosen or os.path.exists(model) or not question:
                raise
            raise BadInput(f"{error}; {question}") from error

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LLM:
        """Build an LLM from a composed configuration.

        All knobs of `decoding` count as set by the user, unless `decoding_given` names those that
        are.
        """
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: dict[str, Any]) -> None:
        if Config.of(config).runtime.profile:
            raise BadInput(
                "runtime.profile=true is for task=bench, whose measurement it traces: leave it out"
            )
        self.config = config
        try:
            with ProgressBar("loading") as bar:
                self.engine = build_engine(config, bar)
        except MemoryError as error:
            raise BadInput(str(error) or "there is not enough memory for the weights") from error
        self._requests = EngineRequests(self.engine)
        self.tokenizer = self.engine.tokenizer
        # The checkpoint's values of the decoding parameters that the user has not set.
        self.checkpoint_defaults = unset_defaults(
            config["decoding"], config.get("decoding_given"), self.engine.loaded.decoding_defaults
        )
        self._warned_of_defaults = False
        self._warned_of_equal_noise = False

    @cached_property
    def pictures(self) -> Pictures:
        """What opens the pictures of prompts, made for the first that has some. Raises BadInput
        after `close`."""
        from minivllm.extras.vision.pictures import Pictures

        vision = self._requests.engine.loaded.vision
        processor = None if vision is None else vision.processor
        return Pictures(processor, self.tokenizer, Config.of(self.config).vision)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Complete all prompts, which run together as the batching policy allows.

        Args:
            prompts: texts or lists of token ids; see prompts.py for the forms that these may have.
            sampling_params: one for all, or one a prompt; None takes the configuration's
                `decoding`.
            use_tqdm: whether a terminal shows the progress, after the first second.
            on_error: a completion that fails on the way (no token is allowed, logits are not
                finite) has the finish reason "error" and its `error`. "return" warns of it, "raise"
                raises the first such error once all prompts are done.

        Returns:
            One output a prompt, in order.

        Raises:
            BadInput: a prompt or its parameters cannot be served; nothing is computed then.
            Exception: with on_error="raise", what ended a completion.
        """
        batch = [self._encoded(prompt) for prompt in as_batch(prompts)]
        return self._generate(batch, sampling_params, use_tqdm, on_error)

    def _encoded(self, prompt: Prompt) -> EncodedPrompt:
        """A prompt's text, if it has one, its token ids and its images."""
        text = text_or_ids(prompt)
        ids, inputs = self.encode(text), None
        if images := images_of(prompt):
            ids, inputs = self.pictures.insert(ids, images)
        return text if isinstance(text, str) else None, ids, inputs

    def _generate(
        self,
        batch: Sequence[EncodedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        on_error: OnError,
    ) -> list[RequestOutput]:
        check_on_error(on_error)
        chosen = params_of_each(len(batch), params, self.get_default_sampling_params)
        self._warn_of_equal_noise(chosen)
        started = time.perf_counter()
        results: list[RequestOutput] = []
        completions: Completions = {}
        firsts: list[Request] = []
        try:
            for number, ((text, ids, inputs), one) in enumerate(zip(batch, chosen, strict=True)):
                results.append(RequestOutput(text, ids, []))
                try:
                    firsts.append(self._begin(results[-1], one, completions, inputs))
                except BadInput as error:
                    which = f"prompts[{number}]: " if len(batch) > 1 else ""
                    raise BadInput(f"{which}{error}") from None
            self._complete(completions, started, use_tqdm)
        finally:
            for request_id in completions:
                self._requests.forget(request_id)
        for request, result in zip(firsts, results, strict=True):
            result.finished = True
            result.prompt_logprobs = request.prompt_logprobs
            if request.is_joint and request.finish_reason != "error":
                search = cast("BeamSearch", request.group)
                result.outputs = beam_completions(request, search, self.tokenizer)
        return report_errors(results, on_error)

    def _begin(
        self,
        result: RequestOutput,
        params: SamplingParams,
        completions: Completions,
        inputs: RequestInputs | None,
    ) -> Request:
        """Submit the prompt of `result`, and add its completions there and to `completions`."""
        first = self._requests.submit(result.prompt_token_ids, params, inputs)
        result.request_id = first.request_id
        for request_id, completion in new_completions(first, self.tokenizer is not None):
            result.outputs.append(completion)
            completions[request_id] = (result, completion)
        return first

    def _complete(self, completions: Completions, started: float, use_tqdm: bool) -> None:
        """Step the engine until each of these requests has ended; `started` is in seconds of
        `time.perf_counter`."""
        unfinished = dict.fromkeys(completions)
        with ProgressBar("generating") as bar:
            while unfinished:
                outputs = self._requests.collect(unfinished)
                for output in outputs:
                    result, completion = completions[output.request.request_id]
                    result.add(completion, output, time.perf_counter() - started)
                    if output.finish_reason is not None:
                        del unfinished[output.request.request_id]
                if not outputs and self._requests.lost(unfinished):  # a step elsewhere has failed
                    for request_id in unfinished:
                        completions[request_id][1].finish_reason = "abort"
                    return
                if use_tqdm:
                    bar(len(completions) - len(unfinished), len(completions))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        Args:
            messages: {"role": ..., "content": ...} in order, or a list of such conversations.
            sampling_params, use_tqdm: as for `generate`.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.
            tools: descriptions of functions for the chat template; the text of its system turn
                where it takes none. Calls in the answer stay text.
            chat_template_kwargs: further variables of the chat template, such as enable_thinking;
                they win over the two above.
            on_error: as for `generate`.

        Returns:
            One output a conversation, in order; `prompt` is the text of the chat template.

        Raises:
            BadInput: there is no tokenizer or chat template, or it rejects the messages; and as
                `generate`.
        """
        if self.tokenizer is None:
            raise BadInput(
                "this checkpoint has no tokenizer: it cannot chat; give token ids to generate"
            )
        variables = template_variables(add_generation_prompt, tools, chat_template_kwargs)
        given = conversations(messages, lambda: self.pictures.parts(trusted=True))
        batch: list[EncodedPrompt] = []
        for one, parts in given:
            text = self.tokenizer.chat_text(one, **variables)
            ids = self.tokenizer.encode(text, False)
            batch.append((text, *self.pictures.add(ids, parts)))
        return self._generate(batch, sampling_params, use_tqdm, on_error)

    def _warn_of_equal_noise(self, params: Sequence[SamplingParams]) -> None:
        """Warn once where several prompts draw with the same seed."""
        seeds = [one.seed for one in params if one.seed is not None and not one.greedy]
        if len(set(seeds)) < len(seeds) and not self._warned_of_equal_noise:
            self._warned_of_equal_noise = True
            warnings.warn(
                "several prompts have the same seed, so they draw with the same noise; give "
                "each SamplingParams a seed of its own, or none (shown once)",
                stacklevel=4,
            )

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Complete one prompt, a piece for each token; closing the stream ends the request.

        `async for` leaves the event loop free while the engine computes. Several streams may be
        open at once: each step of the engine serves all of them.

        Raises:
            BadInput: the prompt cannot be served, the LLM is closed, or `n`, `beam_width` or
                `prompt_logprobs` ask for more than one stream of tokens can carry.
        """
        params = sampling_params or self.get_default_sampling_params()
        check_streamable(params)
        _, ids, inputs = self._encoded(prompt)
        return self._requests.stream(self._requests.submit(ids, params, inputs))

    def logits(self, prompt: Prompt) -> Tensor:
        """The logits at every position of a prompt: float32 [tokens, vocab]."""
        _, ids, inputs = self._encoded(prompt)
        return sequence_logits(self._requests.engine, ids, inputs)

    @property
    def default_params(self) -> SamplingParams:
        """The decoding parameters of the configuration.

        The checkpoint's generation_config.json sets those knobs that the user has not, unless the
        user has chosen an option of `decoding`.
        """
        return params_of({**self.config["decoding"], **self.checkpoint_defaults})

    def get_default_sampling_params(self) -> SamplingParams:
        """The `default_params`; warns once of those that the checkpoint sets."""
        if self.checkpoint_defaults and not self._warned_of_defaults:
            self._warned_of_defaults = True
            warnings.warn(f"{self.defaults_note()} (shown once)", stacklevel=3)
        return self.default_params

    def defaults_note(self) -> str:
        """One line that names the `checkpoint_defaults`; empty where there are none."""
        return described(self.checkpoint_defaults)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            BadInput: the prompt is neither text nor ids, or text without a tokenizer.
        """
        prompt = text_or_ids(prompt)
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise BadInput("this checkpoint has no tokenizer.json: give token ids instead of text")
        return self.tokenizer.encode(prompt)

    def close(self) -> None:
        """Release the model and the cache; the LLM cannot be used afterwards."""
        if engine := self._requests.close():
            del self.engine
            close_engine(engine)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _composed(overrides: Sequence[str], config_dir: str | Path | None) -> dict[str, Any]:
    """The configuration of an engine; of a whole run where that of an engine alone lacks what an
    override or an option names. Raises BadInput."""
    touched = {re.split("[.@=]", text.lstrip("+~"))[0] for text in overrides}
    if touched <= {*LLM_GROUPS}:
        with suppress(BadInput):
            return compose(overrides, config_dir, LLM_ROOT)
    return compose(overrides, config_dir)
