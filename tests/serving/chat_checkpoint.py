"""A small checkpoint that talks: a chat template, a byte-level tokenizer, and weights made by hand.

Attention and MLP add nothing, and the head maps each token to its successor, so that the last token
of the prompt decides the answer, and every answer ends by itself. Where a constraint forbids the
successor, the head's second choice is what closes a JSON text soonest.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

END = "<|end|>"  # of every turn; the model's end-of-sequence token
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>"]
# The last token of a prompt -> the words of the answer to it, each word a token; of several words
# in a tuple the first is the likeliest. No word occurs twice, and none is one ASCII character,
# which are the tokens of any other text.
Word = str | bytes | tuple[str, ...]
ANSWERS: dict[str, list[Word]] = {
    "<|answer|>": [
        "Hello",
        (" there", " friend", " world", " again"),
        ": a",
        (" café", " bar", " teahouse"),
        " 値 na",
        *(b"\xc3", b"\xaf"),  # ï
        "ve",
        (" and", " or", " but"),
        " so ",
        *(b"\xf0\x9f", b"\x98\x80"),  # an emoji
        " on",
        ("..", "!!", "??"),
    ],
    "<|thinks|>": [
        *("<think>", "\nLet me", " think", " of é.\n", "</think>", "\n\n"),
        *("The sum", " is", " four."),
    ],
    "<|calls|>": [
        *("<tool_call>", '\n{"name": ', '"get_', 'weather", ', '"arguments": {"location": "'),
        *("Par", "is", '"}}\n', "</tool_call>"),
    ],
    # Text, and two calls whose tags are spelled by ordinary tokens.
    "<|calls twice|>": [
        *("Let me", " see.\n", "<tool_", 'call>\n{"name"', ': "get_weather"', ', "arguments": {'),
        *('"location"', ': "Paris"}}', "\n</tool", "_call>\n<", "tool_call>\n", '{"name": "get_'),
        *('time", "arg', 'uments": {"zone"', ': "UTC"}', "}\n</", "tool_call>\n\n"),
    ],
    "<|thinks and calls|>": [
        *("<th", "ink>\n", "I need", " the weather.", "\n</thi", "nk>\n\n"),
        *("<tool_call", ">\n{", '"name": "get_weather", "arguments"', ': {"location": "Par'),
        *('is"}}', "\n</tool_", "call>"),
    ],
}
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # tokens, but no special ones

GREETING = "Hello there: a café 値 naïve and so 😀 on.."
THOUGHT, CONCLUSION = "\nLet me think of é.\n", "The sum is four."
CALL = ("get_weather", {"location": "Paris"})
SECOND_CALL = ("get_time", {"zone": "UTC"})

TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif -%}
{%- for m in messages -%}
{%- if m.role not in ('system', 'user', 'assistant', 'tool') -%}
{{ raise_exception('there is no role ' + m.role) }}
{%- endif -%}
<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if tools and messages[-1].role != 'tool' -%}
{%- if enable_thinking %}<|thinks and calls|>
{%- elif tools | length > 1 %}<|calls twice|>
{%- else %}<|calls|>
{%- endif -%}
{%- elif thinking %}<|assistant|><think>
{%- elif enable_thinking %}<|thinks|>
{%- else %}<|answer|>
{%- endif -%}
{%- endif -%}
"""

HIDDEN = 512  # one dimension a token, and one for what each token weighs by itself
UNIT = (HIDDEN / 2) ** 0.5  # of a hidden state of two ones, after the norm
SUCCESSOR, NEXT_ONE = 40.0, 0.5  # logit of the likeliest successor, and what the next ones lack
# What ends a JSON text soonest comes first; what could go on for ever comes last.
SOONEST = ['"', "}", "]", ",", ":", "{", "[", *"0123456789", *"tfnrueals"]
LAST = [*"\\-. \n\r\t"]


def _alphabet() -> dict[int, str]:
    """Each byte as the byte-level tokenizers write it (GPT-2, Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    pairs = [(byte, chr(byte)) for byte in plain]
    return dict(pairs + [(byte, chr(256 + i)) for i, byte in enumerate(others)])


_ALPHABET = _alphabet()


def _spelled(word: str | bytes) -> str:
    """A word as it stands in the vocabulary."""
    data = word if isinstance(word, bytes) else word.encode()
    return "".join(_ALPHABET[byte] for byte in data)


def _choices(word: Word) -> list[str]:
    """The names of the tokens that a word may be."""
    words = word if isinstance(word, tuple) else (word,)
    return [one if one in TAGS else _spelled(one) for one in words]


def _tokenizer() -> FastTokenizer:
    vocabulary = {letter: byte for byte, letter in _ALPHABET.items()}
    names = [name for words in ANSWERS.values() for word in words for name in _choices(word)]
    assert len(set(names)) == len(names), "a word that comes twice has no one successor"
    for name in names:
        if name not in TAGS:
            vocabulary.setdefault(name, len(vocabulary))
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    fast.add_special_tokens([END, *ROLES, *ANSWERS])
    return fast


def _head(fast: FastTokenizer) -> torch.Tensor:
    """The logits that follow each token, [vocab, hidden]."""
    size = fast.get_vocab_size()
    head = torch.zeros(size, HIDDEN)

    def token(name: str) -> int:
        found = fast.token_to_id(name)
        assert found is not None, name
        return found

    head[:256, -1] = 2.0
    for rank, letter in enumerate(SOONEST):
        head[token(letter), -1] = 7.5 - rank / 8
    for rank, letter in enumerate(LAST):
        head[token(_spelled(letter)), -1] = 1.5 - rank / 8
    head[token(END), -1] = 8.0
    head[token("<tool_call>"), -1] = 1.0  # rather than a thought
    for opening, closing in ("{}", "[]"):
        head[token(closing), token(opening)] = 2.0
    ends = [([first], words) for first, words in ANSWERS.items()]
    ends.append(([END], ANSWERS["<|answer|>"]))  # where the end is ignored
    for before, words in ends:
        for word in [*words, END]:
            names = _choices(word) if word != END else [END]
            for earlier in map(token, before):
                for rank, name in enumerate(names):
                    head[token(name), earlier] = SUCCESSOR - NEXT_ONE * rank
            before = names
    return head / UNIT


def make_chat_checkpoint(folder: Path) -> Path:
    """Write the checkpoint into a folder, and return the folder."""
    fast = _tokenizer()
    size, kv, inner = fast.get_vocab_size(), 64, 64
    assert size < HIDDEN
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": kv,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": fast.token_to_id(END),
        "dtype": "bfloat16",
    }
    embedding = torch.eye(size, HIDDEN)
    embedding[:, -1] = 1.0
    layer = {
        "self_attn.q_proj": (kv, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, kv),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
    }
    weights = {f"model.layers.0.{name}.weight": torch.zeros(at) for name, at in layer.items()}
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        weights[f"model.{norm}.weight"] = torch.ones(HIDDEN)
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": _head(fast)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: w.bfloat16() for name, w in weights.items()}, folder / "model.safetensors")
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
