"""Options of the optimizer and of loss scaling: the config section `[optim]`. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from isotron.core.options import option

METHODS = ("adamw", "adam_l2", "sgd", "lion", "adafactor", "muon")
ABSENT = {
    "soap": "no well-kept library has SOAP, which keeps two square matrices beside each weight; muon, too, works on "
    "whole matrices and keeps a momentum alone",
    "shampoo": "no well-kept library has it; muon, too, works on whole matrices and keeps a momentum alone",
    "lamb": "its step follows the length of whole weights, as adafactor's does",
    "adagrad": "its second moments only grow; adamw forgets them, adafactor keeps means of them",
}
WIDTHS = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class OptimConfig:
    """The update rule, what it does to which parameters, clipping by one global norm, and the loss scale of float16."""

    optimizer: str = option(
        "adamw",
        "the update rule: adamw, adam_l2 (weight decay in the gradient), sgd, lion, adafactor (second moments as means "
        "of rows and columns), or muon on the matrices of blocks",
        choices=METHODS,
        absent=ABSENT,
    )
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.95, "decay of the second moment")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    sgd_momentum: float = option(0.9, "of sgd; 0 keeps no state")
    lion_beta1: float = option(0.95, "share of the old momentum in the direction that lion takes the sign of")
    lion_beta2: float = option(0.98, "decay of lion's momentum")
    adafactor_decay: float = option(
        0.8, "adafactor's second moments take in a share of step ** -this of every new gradient"
    )
    adafactor_clip: float = option(1.0, "largest root mean square of a matrix's update of adafactor, before its length")
    adafactor_min_rms: float = option(1e-3, "smallest root mean square of weights that adafactor's updates follow")
    adafactor_eps: float = option(
        0.0, "floor of adafactor's row means, and of roots of second moments; 0 means that of the type, as in torch"
    )
    muon_momentum: float = option(0.95, "decay of muon's momentum")
    muon_nesterov: bool = option(True, "muon looks one step ahead along its momentum")
    muon_ns_steps: int = option(5, "Newton-Schulz iterations of muon")
    muon_scale_mode: str = option(
        "spectral",
        "length of muon's update: spectral sqrt(max(rows, columns)), unit_rms_norm sqrt(rows / columns), "
        "shape_scaling sqrt(max(1, rows / columns))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = option(0.2, "times that length; with spectral, 0.2 suits AdamW's learning rates")
    muon_others: str = option("adamw", "the rule for what is no matrix of a block under muon", choices=METHODS[:-1])
    exp_avg_dtype: str = option(
        "float32",
        "type in which momentum (first moments) is kept; float32 means as wide as gradients, int8 is block-wise",
        choices=WIDTHS,
    )
    exp_avg_sq_dtype: str = option(
        "float32",
        "type in which second moments are kept; float32 means as wide as gradients, int8 is block-wise",
        choices=WIDTHS,
    )
    master_remainders: bool = option(
        False, "with bfloat16 weights, keep the 16 bits that they lack instead of float32 masters"
    )
    mup_base_hidden_size: int = option(
        0, "muP: the hidden_size at which lr was found; initial weights and rates follow the width; 0 means no muP"
    )
    param_groups: tuple[str, ...] = option(
        (), "other settings for parameters by name: PATTERN:lr_mult=X,wd_mult=X,optimizer=NAME, any of the three"
    )
    freeze: tuple[str, ...] = option((), "patterns of names of parameters that do not train and have no state")
    clip_grad: float = option(1.0, "largest global gradient norm; 0 means no clipping")
    loss_scale: float = option(0.0, "fixed loss scale for float16; 0 means dynamic")
    initial_loss_scale: float = option(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = option(1.0, "lowest dynamic loss scale")
    loss_scale_window: int = option(1000, "clean steps before the loss scale doubles", unit="steps")
    hysteresis: int = option(2, "overflows before the loss scale halves")
