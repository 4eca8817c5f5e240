"""What TRL computes for DPO, IPO and SimPO, as it is kept in trl_dpo.json. Not part of the suite:
it needs TRL, which planish does not.

pip install trl==0.23.1 && python tests/preference/data/trl_dpo.py >
tests/preference/data/trl_dpo.json
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false
import json
from types import SimpleNamespace

import torch
import trl
from trl import import_utils

for flag in [
    name for name in vars(import_utils) if name.endswith("_available") and name.startswith("_")
]:
    # This release asks transformers for these, and transformers 5 answers with a tuple, which is
    # always true.
    setattr(import_utils, flag, False)
from trl import CPOTrainer, DPOTrainer  # noqa: E402

TOKENS = 3
"""Of each answer; SimPO's logprobs are means over them."""

generator = torch.Generator().manual_seed(0)
draws = torch.randn(4, 12, generator=generator) * 8 - 40
policy_chosen, policy_rejected, reference_chosen, reference_rejected = draws


def dpo(chosen, rejected, loss_type, beta, label_smoothing):
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        reference_free=False,
        beta=beta,
        label_smoothing=label_smoothing,
        f_divergence_type="reverse_kl",
        f_divergence_params=None,
        loss_type=loss_type,
    )
    return DPOTrainer.dpo_loss(
        trainer, chosen, rejected, reference_chosen, reference_rejected, loss_type
    )


def simpo(chosen, rejected, beta, gamma):
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        alpha=0.0,
        beta=beta,
        simpo_gamma=gamma,
        label_smoothing=0.0,
        loss_type="simpo",
    )
    return CPOTrainer.cpo_loss(trainer, chosen / TOKENS, rejected / TOKENS)


def case(name, options, compute):
    chosen = policy_chosen.clone().requires_grad_()
    rejected = policy_rejected.clone().requires_grad_()
    losses, chosen_rewards, rejected_rewards = compute(chosen, rejected)
    losses.mean().backward()
    return {
        "name": name,
        "options": options,
        "loss": losses.mean().item(),
        "chosen_reward": chosen_rewards.mean().item(),
        "rejected_reward": rejected_rewards.mean().item(),
        "accuracy": (chosen_rewards > rejected_rewards).float().mean().item(),
        "margin": (chosen_rewards - rejected_rewards).mean().item(),
        "chosen_gradient": chosen.grad.tolist(),
        "rejected_gradient": rejected.grad.tolist(),
    }


cases = []
for beta, smoothing in ((0.1, 0.0), (0.5, 0.0), (0.1, 0.2), (0.5, 0.1)):
    options = {"beta": beta, "label_smoothing": smoothing}
    cases.append(case("dpo", options, lambda c, r, b=beta, s=smoothing: dpo(c, r, "sigmoid", b, s)))
for beta in (0.1, 0.5):
    cases += [case("ipo", {"beta": beta}, lambda c, r, b=beta: dpo(c, r, "ipo", b, 0.0))]
for beta, gamma in ((2.0, 1.0), (0.5, 0.3), (2.0, 0.0)):
    cases.append(
        case(
            "simpo", {"beta": beta, "gamma": gamma}, lambda c, r, b=beta, g=gamma: simpo(c, r, b, g)
        )
    )
found = {
    "trl": trl.__version__,
    "tokens": TOKENS,
    "policy_chosen": policy_chosen.tolist(),
    "policy_rejected": policy_rejected.tolist(),
    "reference_chosen": reference_chosen.tolist(),
    "reference_rejected": reference_rejected.tolist(),
    "cases": cases,
}
print(json.dumps(found, indent=1))
