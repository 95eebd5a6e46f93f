"""Backward in halves, for the schedule zb-h1: that of a torch.nn.Linear gives the gradient of its input at once, and keeps what those of its
weight and bias are made of; these are computed when the walk comes to them. A stage sends the former on before it turns to the latter.

All other parameters have their gradients in the first half. Nothing is computed twice: what the second half takes is held in between, the
input of each such layer and the gradient of what it gave.

Compiled code has a backward of its own, which nobody cuts: layers inside of it are left as they are.
"""

import contextlib
import functools
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import torch

Product = Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor]  # weight, bias, input, gradient of what came of it
Place = Tuple[int, int]  # module, micro-batch


class Halves:
    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        every = dict.fromkeys(each for module in modules for each in module.modules())
        layers = [each for each in every if isinstance(each, torch.nn.Linear) and type(each).forward is torch.nn.Linear.forward]
        inside = {each for module in every if _is_compiled(module) for each in module.modules()}
        self.left_whole = sum(layer in inside for layer in layers)
        # The same ones in every step: what a function compiles that calls such a layer holds for what it finds there.
        self.forwards = {layer: functools.partial(self._forward, layer) for layer in layers if layer not in inside}
        self.at: Optional[Place] = None  # the backward that is walked now; outside of one (gradients asked for in a forward) nothing is in halves
        self.kept: Dict[Place, List[Product]] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, such layers have a backward in halves; also those that are computed again for it."""
        layers = [layer for layer in self.forwards if "forward" not in vars(layer)]
        for layer in layers:
            vars(layer)["forward"] = self.forwards[layer]
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]
            self.kept.clear()

    def _forward(self, layer: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not (_waits(weight) and (bias is None or _waits(bias))):
            return torch.nn.functional.linear(input, weight, bias)
        given: torch.Tensor = _Linear.apply(input, weight, bias, self)  # type: ignore[no-untyped-call]
        return given

    @contextlib.contextmanager
    def backward_of(self, module: int, micro_batch: int) -> Iterator[None]:
        self.at = (module, micro_batch)
        try:
            yield
        finally:
            self.at = None

    def keep(self, product: Product) -> bool:
        """False where no backward is walked: the caller wants it at once."""
        if self.at is None:
            return False
        self.kept.setdefault(self.at, []).append(product)
        return True

    @torch.no_grad()
    def run(self, module: int, micro_batch: int) -> None:
        """Adds the products of that backward to the gradients of weights and biases."""
        for weight, bias, x, gradient in self.kept.pop((module, micro_batch), []):
            of_weight, of_bias = _products(x, gradient)
            _add(weight, of_weight)
            if bias is not None:
                _add(bias, of_bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], halves: Halves) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.halves = weight, bias, halves  # (as they are: where forward is computed again what is saved is not)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        (x,) = ctx.saved_tensors
        back = (gradient @ ctx.weight.to(gradient.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        if ctx.halves.keep((ctx.weight, ctx.bias, x, gradient)):
            return back, None, None, None
        of_weight, of_bias = _products(x, gradient)
        return back, of_weight.to(ctx.weight.dtype), None if ctx.bias is None else of_bias.to(ctx.bias.dtype), None


def _products(x: torch.Tensor, gradient: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The gradients of a weight and a bias."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    return rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype), rows.sum(0)


def _is_compiled(module: torch.nn.Module) -> bool:
    """By torch.compile(module), or by module.compile()."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def _waits(parameter: torch.Tensor) -> bool:
    """Its gradient may come later: it is added to nothing but the parameter, and nobody watches it."""
    watched = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter.is_leaf and parameter.requires_grad and not watched


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    elif parameter.grad.layout == torch.strided:
        parameter.grad += gradient
    else:  # it is a table's as well
        parameter.grad = gradient.to(parameter.dtype) + parameter.grad
