"""The adapter of one training model: master weights, gradient, AdamW state and compute copy.

Every change creates a new `version` and a new compute copy. The copies that samplers use never
change, so publishing a version only passes a reference. A change is atomic: an optimizer step works
on copies, which replace the old state only if all their values are finite.

A failed forward_backward also fails the optimizer step that follows it. Clients pipeline the two
calls, and a step with an incomplete gradient would not be the step that the client requested.
"""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from planish.errors import CheckpointError, NonFiniteError, UserError, rejected_step
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.types import AdamParams, OptimStepResponse

_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
_NORM_PART_SIZE = 1 << 20
"""The number of values whose float64 copies are in memory at a time for the gradient norm."""


class Adapter:
    """The training state of one LoRA adapter.

    Master, gradient and moments are flat float32 vectors [size] in the order of `layout`, on the
    model's device.
    """

    def __init__(
        self,
        layout: LoraLayout,
        backend: Backend,
        master: Tensor | None = None,
    ) -> None:
        """Create an adapter on the device of `backend`, the backend of the base model.

        `master`: the initial weights, float32 [size]. By default they are sampled with the seed of
        the LoraConfig.
        """
        self.layout = layout
        self._backend = backend
        self.master = (layout.init(layout.lora_config.seed) if master is None else master).to(
            backend.device, torch.float32, copy=True
        )
        self.grad: Tensor | None = None
        self.step = 0
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.version = 0
        self.weights = self._compute_copy()
        self._rejection: UserError | None = None

    def _compute_copy(self) -> LoraWeights:
        return self._backend.lora_weights(self.layout, self.master, requires_grad=True)

    def snapshot(self) -> LoraWeights:
        """Return the current version for samplers. It is immutable and shared, not copied."""
        return self.weights

    def add_grad(self, grad: Tensor) -> None:
        """Add a gradient with respect to the master vector, float32 [size].

        The next optimizer step applies the sum of the gradients added since the last step.
        """
        self.grad = grad if self.grad is None else self.grad + grad

    def reject_next_step(self, error: BaseException) -> None:
        """Make the next optimizer step fail, because a forward_backward failed with `error`.

        That step raises `rejected_step(error)` and drops the accumulated gradient.
        """
        self._rejection = self._rejection or rejected_step(error)

    def optim_step(self, params: AdamParams) -> OptimStepResponse:
        """Apply one step of torch.optim.AdamW to the accumulated gradient, then drop the gradient.

        The gradient is clipped to a global norm if `params.grad_clip_norm` is positive.

        Raises NonFiniteError if the gradient or a new value is not finite. Raises UserError if
        there is no gradient, or if a forward_backward since the last step failed. After an error
        weights and optimizer state are unchanged, and the gradient is dropped.
        """
        grad, rejection = self.grad, self._rejection
        self.grad, self._rejection = None, None
        if rejection is not None:
            raise rejection
        if grad is None:
            raise UserError(
                "optim_step has no gradient to apply; call forward_backward first, because each "
                "step clears the gradient"
            )
        norm = _grad_norm(grad)
        if not math.isfinite(norm):
            raise NonFiniteError(
                "optim_step rejected: the gradient is not finite; lower learning_rate, or check "
                "the advantages"
            )
        if params.grad_clip_norm > 0:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
            grad = grad * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        master, moments = self._adam_step(grad, params)
        if not all(is_finite(tensor) for tensor in (master, *moments)):
            raise NonFiniteError(
                "optim_step rejected: the new weights would not be finite; lower learning_rate"
            )
        self._install_state(master, moments, self.step + 1)
        return OptimStepResponse(metrics={"grad_norm": norm, "adam_step": float(self.step)})

    def _adam_step(self, grad: Tensor, params: AdamParams) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the master weights and moments after one AdamW step, without changing the old."""
        master = self.master.clone()
        exp_avg = self.exp_avg.clone()
        exp_avg_sq = self.exp_avg_sq.clone()
        step = torch.tensor(float(self.step), device=master.device)
        # Call the functional `adamw`, which computes the same as torch.optim.AdamW. The first
        # torch.optim.AdamW of a process takes a second or two to import torch's compiler.
        adamw(
            [master],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
            maximize=False,
        )
        return master, (exp_avg, exp_avg_sq)

    def _install_state(self, master: Tensor, moments: tuple[Tensor, Tensor], step: int) -> None:
        """Install a new state as the next version, with a new compute copy."""
        self.master, (self.exp_avg, self.exp_avg_sq), self.step = master, moments, step
        self.weights.end_training()
        self.weights = self._compute_copy()
        self.version += 1

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: master, exp_avg, exp_avg_sq (float32 [size]) and step
        (int64).

        A pending gradient is not part of the state. The returned tensors never change later,
        because an optimizer step replaces its tensors instead of modifying them.
        """
        return {
            "master": self.master,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "step": torch.tensor(self.step, dtype=torch.int64),
        }

    def load_state(self, state: dict[str, Tensor], with_optimizer: bool = True) -> None:
        """Load the `state()` of another adapter with this layout, and drop a pending gradient.

        With `with_optimizer` false, the moments and the step count are reset to zero.

        Raises CheckpointError if a tensor is missing, has another shape, or is not finite. The
        adapter is unchanged then.
        """
        names = ("master", *_MOMENT_NAMES) if with_optimizer else ("master",)
        tensors = {name: self._checked_tensor(name, state) for name in names}
        step = 0
        if with_optimizer:
            if "step" not in state:
                raise CheckpointError(
                    "the checkpoint has no optimizer step; load it without the optimizer"
                )
            step = int(state["step"])
        moments = (tensors.get("exp_avg"), tensors.get("exp_avg_sq"))
        loaded_moments = tuple(
            torch.zeros_like(self.master) if moment is None else moment for moment in moments
        )
        self.grad, self._rejection = None, None
        self._install_state(tensors["master"], (loaded_moments[0], loaded_moments[1]), step)

    def _checked_tensor(self, name: str, state: dict[str, Tensor]) -> Tensor:
        """Return a checked float32 copy of one tensor of a checkpoint, on the model's device."""
        if name not in state:
            raise CheckpointError(
                f"the checkpoint has no {name!r}; load it without the optimizer, or save it again "
                "with save_state"
            )
        tensor = state[name]
        if tensor.shape != self.master.shape:
            raise CheckpointError(
                f"the checkpoint's {name!r} has {tensor.numel()} values, but this adapter has "
                f"{self.layout.size}; create the model with the checkpoint's rank and train_* "
                "options"
            )
        if not is_finite(tensor):
            raise CheckpointError(
                f"the checkpoint's {name!r} contains NaN or infinity; use an earlier checkpoint"
            )
        return tensor.to(self.master.device, torch.float32, copy=True)


def is_finite(tensor: Tensor) -> bool:
    """Return whether no entry is NaN or infinite.

    It costs a fraction of `torch.isfinite(tensor).all()`.
    """
    low, high = torch.aminmax(tensor)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _grad_norm(grad: Tensor) -> float:
    """Return the L2 norm of the gradient, summed in float64.

    A GPU synchronizes once.
    """
    # A float32 sum of 300 million squares on a CPU is 4% too small, and the squares of finite
    # numbers may overflow float32. On a CPU, `dtype=torch.float64` makes a float64 copy, so the
    # norm is computed part by part.
    norms = [
        torch.linalg.vector_norm(part, dtype=torch.float64) for part in grad.split(_NORM_PART_SIZE)
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
