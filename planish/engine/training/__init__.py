"""Training: datums become losses and gradients, gradients become adapter updates."""
