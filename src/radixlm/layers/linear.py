"""Linear layers: the scheme decides how weights are stored, the kernels how they run."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from radixlm.base.errors import ConfigError
from radixlm.kernels.dispatch import Kernels
from radixlm.kernels.ops.linear import PackedLinear
from radixlm.kernels.ops.lora import LoraRows
from radixlm.layers.module import Module
from radixlm.layers.placement import WHOLE, CutLinear, Placement
from radixlm.quant.param import Cut, Param, Shard
from radixlm.quant.scheme import Scheme


class StepAdapters:
    """The adapters of the step that runs: the model sets ``rows`` before its layers run."""

    rows: LoraRows | None = None


class Adaptable(Protocol):
    """A layer that adapters may change."""

    @property
    def packed_sites(self) -> dict[int, int]:
        """The number of each matrix among all that adapters may change, by the ``id`` of what is
        packed."""

    def adapt(self, site: int, step: StepAdapters) -> None:
        """Let adapters change the layer, which is loaded; its first matrix has this number."""


class Linear(Module):
    """y = x W^T + b. ``run`` is bound to the packed weight's by ``finish``. ``site``: its number
    among the layers that adapters may change, -1 for none."""

    run: Callable[[Tensor], Tensor]
    packed: PackedLinear
    own: PackedLinear  # this rank's outputs, without what ranks exchange
    site = -1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        scheme: Scheme,
        kernels: Kernels,
        shard: Shard | None = None,
        gate_act: str = "",
        place: Placement = WHOLE,
    ) -> None:
        """With ``gate_act``, the rows are [gate; up] and ``run`` gives act(gate) * up. ``place``:
        what of it this rank holds."""
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self._kernels, self._gate_act = kernels, gate_act
        self._params, self.place = scheme.params(out_features, in_features, bias, shard), place
        if place.rows:
            for param in self._params.values():
                param.cut(Cut(0, out_features, place.rows))

    def own_params(self) -> dict[str, Param]:
        return self._params

    def finish(self) -> None:
        self.own = self.scheme.pack(self._kernels, self._params, self._gate_act)
        is_whole = not (self.place.inputs or self.place.outputs)
        self.packed = self.own if is_whole else CutLinear(self.own, self.place)
        self.run = self.packed.run if self.site < 0 else self._run_adapted

    def adapt(self, site: int, step: StepAdapters) -> None:
        """Let adapters change the layer, which is loaded. ConfigError if its kernels cannot."""
        if self._gate_act and not hasattr(self.own, "run_changed"):
            raise ConfigError(
                f"--enable-lora: {type(self.own).__name__} takes no adapters; choose another "
                "--quantization"
            )
        self.site, self._step, self.run = site, step, self._run_adapted

    @property
    def packed_sites(self) -> dict[int, int]:
        """The site by the ``id`` of what is packed."""
        return {id(self.packed): self.site}

    def own_bias(self) -> Tensor | None:
        """The bias of this rank's outputs of the loaded layer, float32 [O], which is what it makes
        of zeros; None without one."""
        if "bias" not in self._params:
            return None
        found: list[Tensor] = []
        zeros_1I = self.packed.unpack().new_zeros(1, self.in_features)  # where the weight is
        if self._gate_act:
            changed: Callable[..., Tensor] = self.own.run_changed  # type: ignore[attr-defined]
            changed(zeros_1I, lambda h: found.append(h.clone()))
        else:
            found.append(self.own.run(zeros_1I))
        return found[0][0].float()

    def _run_adapted(self, x_TI: Tensor) -> Tensor:
        rows, packed = self._step.rows, self.packed
        if rows is None or not rows.has(self.site):
            return packed.run(x_TI)
        cut = packed if isinstance(packed, CutLinear) else CutLinear(packed, WHOLE)
        x_TI = cut.whole_inputs(x_TI)
        if self._gate_act:
            changed: Callable[..., Tensor] = cut.inner.run_changed  # type: ignore[attr-defined]
            return cut.gathered(changed(x_TI, partial(rows.add_, self.site, x_TI)))
        y_TO = cut.inner.run(x_TI)
        rows.add_(self.site, x_TI, y_TO)
        return cut.gathered(y_TO)
