"""The model that lm-eval calls (Gao et al., "A framework for few-shot language model evaluation").

Requests are encoded, cut to the context and post-processed as lm-eval's own `hf` model does it, so
that both give the same numbers; the model itself is this project's engine, as `LLM` configures it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lm_eval.models  # noqa: F401  lm-eval fills its registry only while that is empty
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput, nearest
from minivllm.evaluation.model_arguments import engine_overrides
from minivllm.llm import LLM
from minivllm.outputs import report_errors

logger = logging.getLogger(__name__)

GENERATION = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "min_tokens", "ignore_eos"),
)
DEFAULT_NEW_TOKENS = 256  # of a task that sets no limit, as with lm-eval's hf
# Batches of requests in one call: the batch stays full, and the results fit in memory.
FULL_BATCHES = 8
# Marks the end of an open message; a template that strips the message strips the last space.
MARK = "<where the message goes on> "

# The texts of a request, and the token ids of its context and its continuation.
Scored = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("minivllm")
class MiniVLLM(TemplateLM):
    """`--model minivllm`: answers the calls of lm-eval's tasks with this project's engine.

    Args:
        pretrained: a name from conf/model, a checkpoint folder or a hub id.
        device: "auto", "cpu" or "cuda"; lm-eval's own default, "cuda:0", is "auto" where there is
            no GPU.
        batch_size: most requests in a step (`batching.max_num_seqs`); lm-eval's default of 1, or
            "auto", leaves it to the engine, which fills its batch from all requests.
        config_dir: a further folder of option files.
        enable_thinking: passed to the chat template, where given.
        think_end_token: what ends the thinking; only the text after it is the answer.
        engine: options by group and knobs by name, e.g. quant="nf4" and {"cache.block_size": 32}.

    Raises:
        BadInput: an argument is wrong, or the checkpoint has no tokenizer, no end-of-text token or
            random weights.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        config_dir: str | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        **engine: Any,
    ) -> None:
        super().__init__()
        if pretrained is None:
            raise BadInput(
                "pretrained is missing: give --model_args pretrained=NAME_FOLDER_OR_HUB_ID"
            )
        if enable_thinking and think_end_token is None:
            raise BadInput("enable_thinking needs think_end_token, e.g. think_end_token=</think>")
        groups, overrides = engine_overrides(engine)
        size = str(batch_size or "auto")
        if size != "1" and not size.startswith("auto"):
            overrides.insert(0, f"batching.max_num_seqs={size}")
        # lm-eval's default, which the user has not set.
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None
        self.pretrained = str(pretrained)
        self.enable_thinking, self.think_end_token = enable_thinking, think_end_token
        self.llm = LLM(
            self.pretrained,
            device=device or "auto",
            overrides=overrides,
            config_dir=config_dir,
            **groups,
        )
        if self.llm.engine.loaded.weights == "random":
            raise BadInput("model.weights=random has only noise: lm-eval needs trained weights")
        if self.llm.tokenizer is None:
            raise BadInput(f"{self.pretrained} has no tokenizer.json, and lm-eval sends text")
        self.tokenizer = self.llm.tokenizer
        self._device = self.llm.engine.runner.device
        eos = (self.tokenizer.special_id("eos_token"), *self.llm.engine.loaded.config.eos_token_ids)
        if (end := next((token for token in eos if token is not None), None)) is None:
            raise BadInput(
                f"{self.pretrained} names no eos_token: an empty context needs one to start from"
            )
        self._eos = end
        self._special = {
            t.content: i for i, t in self._fast.get_added_tokens_decoder().items() if t.special
        }

    @property
    def _fast(self) -> Any:
        return self.tokenizer.fast

    # ---- what lm-eval asks about the model

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text: the beginning-of-text token, or else the end
        token."""
        bos = self.tokenizer.special_id("bos_token")
        return self._eos if bos is None else bos

    @property
    def max_length(self) -> int:
        """The largest number of tokens in the context."""
        return self.llm.engine.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """The name of lm-eval's cache of tokenized requests."""
        return self.pretrained.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """The entries of lm-eval's results beside the arguments: the weights' fingerprint and the
        engine's options."""
        return {
            "model_sha": self.llm.engine.loaded.fingerprint,
            "minivllm": self.llm.config["choices"],
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text.

        Special tokens are added unless the text begins with one; `add_special_tokens` overrides
        this.
        """
        if add_special_tokens is None:
            prefix = self._fast.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return self.tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without a generation prompt its last message is left open.

        Raises:
            BadInput: there is no chat template, or it rejects the messages, also without system
                messages.
        """
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        messages = chat_history
        if not add_generation_prompt:
            last = chat_history[-1]
            messages = [*chat_history[:-1], last | {"content": last["content"] + MARK}]
        try:
            text = self.tokenizer.chat_text(
                messages, add_generation_prompt=add_generation_prompt, **thinking
            )
        except BadInput:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            logger.warning(
                "the chat template rejects the conversation: trying without the system message"
            )
            return self.apply_chat_template(rest, add_generation_prompt)
        if add_generation_prompt:
            return text
        open_text, mark, after = text.rpartition(MARK.strip())
        if not mark:
            raise BadInput(
                "the chat template drops the last message, which the task wants continued"
            )
        return open_text if after.startswith(" ") else open_text.rstrip()

    # ---- scoring

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is the greedy
        one."""
        if self.enable_thinking:
            raise BadInput("enable_thinking=True is for generation; this task scores given answers")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text, in windows of the context's length."""
        windows: list[Scored] = []
        counts: list[int] = []
        for (text,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(text),
                self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Score token ids; a context that does not fit loses its beginning.

        Raises:
            BadInput: a continuation has no token of its own, or more than the context holds.
        """
        for _texts, _context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise BadInput(
                    f"a continuation of {len(continuation)} tokens cannot be scored: it must "
                    f"have 1 to {self.max_length}, the context's length"
                )
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        for chunk in self._chunks(lengths, "Running loglikelihood requests", disable_tqdm):
            for place, result in self._score([requests[i][1:] for i in chunk]):
                scores[chunk[place]] = result
                if (texts := requests[chunk[place]][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, result)
        return scores

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Index, log-probability and greediness of each continuation, given (context,
        continuation). Raises what ended one of them after all others, which lm-eval's cache then
        holds."""
        wholes = [
            (context + continuation)[-(self.max_length + 1) :] for context, continuation in pairs
        ]
        # A request needs room for one more token; sequences without it are scored one by one.
        together = [i for i, whole in enumerate(wholes) if len(whole) < self.max_length]
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        outputs = dict(
            zip(
                together,
                self.llm.generate([wholes[i] for i in together], params, use_tqdm=False),
                strict=True,
            )
            if together
            else ()
        )
        for i, (whole, (_, continuation)) in enumerate(zip(wholes, pairs, strict=True)):
            if i not in outputs:
                yield i, self._score_alone(whole, continuation)
                continue
            if outputs[i].outputs[0].error is not None:
                continue
            entries = outputs[i].prompt_logprobs
            assert entries is not None
            scored = list(zip(continuation, entries[-len(continuation) :], strict=True))
            # An entry holds the token and the most likely one; a greedy token is both.
            logprob = sum(entry[token] for token, entry in scored)
            yield i, (logprob, all(len(entry) == 1 for _, entry in scored))
        report_errors([*outputs.values()], "raise")

    def _score_alone(self, whole: list[int], continuation: list[int]) -> tuple[float, bool]:
        logits = self.llm.logits(whole[:-1])[-len(continuation) :]
        targets = torch.tensor(continuation, device=logits.device)
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])
        return float(logprobs.sum()), bool((logits.argmax(dim=-1) == targets).all())

    # ---- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string, the end of text or the task's
        limit.

        Raises:
            BadInput: a generation argument is unknown, or asks for more tokens than the context
                holds.
        """
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        stops: list[list[str]] = []
        for context, options in (request.args for request in requests):
            one, stop = self._sampling(options)
            assert one.max_tokens is not None
            if one.max_tokens >= self.max_length:
                raise BadInput(
                    f"max_gen_toks={one.max_tokens} leaves no room for the question in a context "
                    f"of {self.max_length}"
                )
            prompts.append(self.tok_encode(context)[-(self.max_length - one.max_tokens) :])
            params.append(one)
            stops.append(stop)
        texts = [""] * len(requests)
        lengths = [len(prompt) for prompt in prompts]
        for chunk in self._chunks(lengths, "Running generate_until requests", disable_tqdm):
            outputs = self.llm.generate(
                [prompts[i] for i in chunk], [params[i] for i in chunk], use_tqdm=False
            )
            for i, output in zip(chunk, outputs, strict=True):
                if output.outputs[0].error is not None:
                    continue
                # The output is decoded without the context, as in lm-eval's other models.
                text = self.tokenizer.decode(output.outputs[0].token_ids)
                texts[i] = postprocess_generated_text(text, stops[i], self.think_end_token)
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
            report_errors(outputs, "raise")  # the others are in lm-eval's cache
        return texts

    def _sampling(self, options: Mapping[str, Any]) -> tuple[SamplingParams, list[str]]:
        """The engine's parameters for a task's generation_kwargs, and the strings that end the
        text."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), DEFAULT_NEW_TOKENS))
        new_tokens = kwargs.pop("max_gen_toks")
        end = self._fast.decode([self._eos], skip_special_tokens=False)
        until = [text for text in handle_stop_sequences(kwargs.pop("until"), eos=end) if text]
        kwargs.pop("do_sample")  # the temperature says the same
        if kwargs.pop("num_beams", 1) != 1:
            raise BadInput(
                "generation_kwargs: num_beams must be 1: a beam ends at a token, and what ends "
                "an answer is text"
            )
        for name in kwargs:
            if name not in GENERATION:
                raise BadInput(
                    f"generation_kwargs: the engine has no {name}; {nearest(name, GENERATION)}"
                )
        # Special tokens are not part of the text, so they are stop tokens and not stop strings.
        ends = {self._eos, *(self._special[text] for text in until if text in self._special)}
        stop = tuple(text for text in until if text not in self._special)
        params = SamplingParams(
            max_tokens=new_tokens, stop=stop, stop_token_ids=tuple(ends), **kwargs
        )
        return params, until

    def _chunks(self, lengths: Sequence[int], what: str, quiet: bool) -> Iterator[list[int]]:
        """Indices of the requests of each call, the longest first, so that one that does not fit
        fails first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        size = FULL_BATCHES * self.llm.engine.scheduler.policy.max_num_seqs
        with tqdm(total=len(order), desc=what, disable=quiet) as bar:
            for begin in range(0, len(order), size):
                chunk = order[begin : begin + size]
                yield chunk
                bar.update(len(chunk))
