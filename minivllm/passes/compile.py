"""runtime.compile: layers compiled by torch.compile, with attention as one opaque operation.

All layers of a kind run the same compiled code, with their weights as inputs. Attention, with the
write of keys and values, and linear layers with other operations than torch's are not compiled: the
compiled code calls them as opaque operations, as vLLM does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.engine.engine import Engine
from minivllm.errors import BadInput, first_line
from minivllm.extras.scoring import sequence_logits
from minivllm.models.layers import Attention
from minivllm.models.load.loading import LoadedModel
from minivllm.models.moe import MoE
from minivllm.passes.base import PassContext, PassReport, Wrapper
from minivllm.quant.fp8 import FP8Linear
from minivllm.quant.int8 import Int8Linear
from minivllm.quant.plain import PlainLinear

# Lengths of the steps that compile. One token and several have variants of their own, and so have
# few and many rows in some quantised products.
LENGTHS = (256, 64, 8, 1)
TRANSPARENT = (PlainLinear, Int8Linear, FP8Linear)
VARIANTS = 64  # of compiled code: kinds of layers times ranges of lengths

# Compiled code names a callee by a ticket, an int64 tensor: torch would compile a number in.
_tickets = count()
_holders: WeakValueDictionary[int, CompiledPart | OpaqueLinear] = WeakValueDictionary()
_library = torch.library.Library("minivllm", "FRAGMENT")
_library.define("attend(Tensor q, Tensor k, Tensor v, Tensor ticket) -> Tensor")
_library.define("product(Tensor x, Tensor ticket, int outputs) -> Tensor")


def _ticket(holder: CompiledPart | OpaqueLinear) -> Tensor:
    number = next(_tickets)
    _holders[number] = holder
    return torch.tensor(number)


@torch.library.impl(_library, "attend", "CompositeExplicitAutograd")
def _attend(q: Tensor, k: Tensor, v: Tensor, ticket: Tensor) -> Tensor:
    out: Tensor = _holders[int(ticket)].call(q, k, v)
    return out.contiguous()  # as the compiled code requires


@torch.library.register_fake("minivllm::attend", lib=_library)
def _attended(q: Tensor, k: Tensor, v: Tensor, ticket: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.impl(_library, "product", "CompositeExplicitAutograd")
def _multiply(x: Tensor, ticket: Tensor, outputs: int) -> Tensor:
    out: Tensor = _holders[int(ticket)].call(x)
    return out.contiguous()


@torch.library.register_fake("minivllm::product", lib=_library)
def _multiplied(x: Tensor, ticket: Tensor, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


class _Ticketed:
    """The stand-in of the backend and of the batch in compiled code. It does not read the layer's
    number, which torch would compile in."""

    @staticmethod
    def forward(layer: int, q: Tensor, k: Tensor, v: Tensor, ticket: Tensor) -> Tensor:
        out: Tensor = torch.ops.minivllm.attend(q, k, v, ticket)
        return out


def _run(part: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, ticket: Tensor) -> Tensor:
    out: Tensor = part(x, cos, sin, ticket, _Ticketed)
    return out


class OpaqueLinear(Wrapper):
    """A linear layer that is opaque to the compiler: another library's product, or a weight in an
    order of its own.

    Args:
        inner: takes [rows, in] to [rows, outputs].
        outputs: width of the result.
    """

    def __init__(self, inner: nn.Module, outputs: int) -> None:
        super().__init__()
        self.inner, self.outputs, self.ticket = inner, outputs, _ticket(self)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, outputs]."""
        out: Tensor = torch.ops.minivllm.product(x, self.ticket, self.outputs)
        return out

    def call(self, *inputs: Tensor) -> Tensor:
        """The product itself."""
        out: Tensor = self.inner(*inputs)
        return out


class Compiler:
    """Inductor, and a count of what it compiled."""

    def __init__(self) -> None:
        self.counters = {"graphs": 0}
        self.compile_s = 0.0  # of the steps that compile
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
        self.run = torch.compile(_run, backend=self, fullgraph=True)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph: torch's interface of backends."""
        from torch._inductor.compile_fx import compile_fx

        self.counters["graphs"] += 1
        return cast("Callable[..., Any]", compile_fx(graph, list(inputs)))


class CompiledPart(Wrapper):
    """A layer, or its attention module, that runs compiled.

    Args:
        inner: takes (x, cos, sin, batch, attention), and calls `attention.forward` with `batch`.
        layer: its number.
        compiler: shared by all parts of an engine.
    """

    def __init__(self, inner: nn.Module, layer: int, compiler: Compiler) -> None:
        super().__init__()
        self.inner, self.layer, self.compiler = inner, layer, compiler
        self.ticket = _ticket(self)
        self.step: tuple[StepBatch, AttentionBackend] | None = None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same."""
        self.step = batch, attention
        if not self.compiler.compile_s and len(x) > 1:
            for tensor in (x, cos, sin):
                torch._dynamo.mark_dynamic(tensor, 0)
        try:
            out: Tensor = self.compiler.run(self.inner, x, cos, sin, self.ticket)
            return out
        finally:
            self.step = None

    def call(self, *inputs: Tensor) -> Tensor:
        """Attention, called by the compiled code: q, k and v as AttentionBackend has them."""
        assert self.step is not None
        q, k, v = inputs
        batch, attention = self.step
        return attention.forward(self.layer, q, k, v, batch)


def _is_transparent(linear: nn.Module) -> bool:
    """Whether a linear layer consists of torch's operations alone, on a weight in torch's order."""
    has_kernel = isinstance(linear, Int8Linear) and linear.products is not None
    return type(linear) in TRANSPARENT and not has_kernel


class CompileLayers:
    """Compiles the layers. Some other knobs have no effect then."""

    name = "compile"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        """The seconds are those of the steps that make it compile."""
        assert context.engine is not None
        runtime = context.runtime
        compiler = compile_layers(context.engine)
        left_out = [knob for knob in ("cpu_kernels", "fused_kernels") if runtime[knob] != "off"]
        left_out += [knob for knob in ("native_layers", "trim_last_layer") if runtime[knob]]
        without = f"runtime.compile=true does without {' and '.join(left_out)}"
        notes = (f"{without}: compare with runs that have them off",) if left_out else ()
        layers = len(loaded.model.model.layers)
        return PassReport(self.name, layers, 0, compiler.compile_s, notes, compiler.counters)


def compile_layers(engine: Engine) -> Compiler:
    """Let every layer run compiled (of a layer with experts only the attention module), and compile
    for every length.

    Returns:
        What has compiled them, and counts.

    Raises:
        BadInput: something in a layer cannot be compiled, or nothing can be on this machine.
    """
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import
    from torch._inductor.exc import InductorError

    model, compiler = engine.loaded.model, Compiler()
    layers = model.model.layers
    with torch.inference_mode():
        for name, width in engine.loaded.linear_inputs.items():
            # Mixtures are not compiled, and grouped experts are no linear layers.
            mixed = ".experts." in name or name.endswith(".gate")
            linear = None if mixed else model.get_submodule(name)
            if linear is not None and not _is_transparent(linear):
                out = linear(torch.zeros(1, width, dtype=model.dtype, device=engine.runner.device))
                model.set_submodule(name, OpaqueLinear(linear, out.shape[1]))
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(module, Attention):
                module.layer = 0  # torch 2.11 compiles it in; `CompiledPart` has the number
        if any(isinstance(module, MoE) for module in layer.modules()):
            layer.self_attn = CompiledPart(layer.get_submodule("self_attn"), number, compiler)
        else:
            layers[number] = CompiledPart(layer, number, compiler)
    begin = time.perf_counter()
    most = min(engine.max_model_len, engine.cache.capacity_tokens)
    try:
        for length in LENGTHS:
            sequence_logits(engine, [0] * min(length, most))
    except (TorchDynamoException, InductorError) as error:
        kinds = sorted(
            {type(module).__name__ for module in layers.modules() if not any(module.children())}
        )
        raise BadInput(
            f"runtime.compile=true: {first_line(error)} (in {', '.join(kinds)}); use another "
            "quant, or runtime.compile=false"
        ) from error
    compiler.compile_s = time.perf_counter() - begin
    return compiler
