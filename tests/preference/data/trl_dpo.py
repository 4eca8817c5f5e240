"""What TRL computes for DPO, as it is kept in trl_dpo.json. Not part of the suite: it needs TRL, which planish does not.

pip install trl==0.23.1 && python tests/preference/data/trl_dpo.py > tests/preference/data/trl_dpo.json
"""

# pyright: reportMissingImports=false, reportOptionalMemberAccess=false
import json
from types import SimpleNamespace

import torch
import trl
from trl import import_utils

for flag in [name for name in vars(import_utils) if name.endswith("_available") and name.startswith("_")]:
    # This release asks transformers for these, and transformers 5 answers with a tuple, which is always true.
    setattr(import_utils, flag, False)
from trl import DPOTrainer  # noqa: E402

generator = torch.Generator().manual_seed(0)
draws = torch.randn(4, 12, generator=generator) * 8 - 40
policy_chosen, policy_rejected, reference_chosen, reference_rejected = draws
cases = []
for beta in (0.1, 0.5):
    chosen = policy_chosen.clone().requires_grad_()
    rejected = policy_rejected.clone().requires_grad_()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        reference_free=False,
        beta=beta,
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        f_divergence_params=None,
        loss_type="sigmoid",
    )
    losses, chosen_rewards, rejected_rewards = DPOTrainer.dpo_loss(
        trainer, chosen, rejected, reference_chosen, reference_rejected, "sigmoid"
    )
    losses.mean().backward()
    cases.append(
        {
            "beta": beta,
            "loss": losses.mean().item(),
            "chosen_reward": chosen_rewards.mean().item(),
            "rejected_reward": rejected_rewards.mean().item(),
            "accuracy": (chosen_rewards > rejected_rewards).float().mean().item(),
            "margin": (chosen_rewards - rejected_rewards).mean().item(),
            "chosen_gradient": chosen.grad.tolist(),
            "rejected_gradient": rejected.grad.tolist(),
        }
    )
found = {
    "trl": trl.__version__,
    "policy_chosen": policy_chosen.tolist(),
    "policy_rejected": policy_rejected.tolist(),
    "reference_chosen": reference_chosen.tolist(),
    "reference_rejected": reference_rejected.tolist(),
    "cases": cases,
}
print(json.dumps(found, indent=1))
