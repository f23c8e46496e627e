"""Rules on what is sharded over data-parallel ranks. PURE."""

from __future__ import annotations

from isotron.config.rules import Facts, Rule, asked, moved, nearest_divisor
from isotron.config.schema import RunConfig
from isotron.core.errors import Problem
from isotron.core.nn.moe_config import MoEConfig


def _shard_size(c: RunConfig, f: Facts) -> Problem:
    dp = c.layout.data_ranks
    case = f"the {dp} data-parallel ranks are cut into groups of this size, and the groups must be equal"
    return Problem(
        asked(c, "zero_shard_size", "dp"), case, f"--zero-shard-size {nearest_divisor(dp, c.layout.zero_shard_size)}"
    )


def _shard_nothing(c: RunConfig, f: Facts) -> Problem:
    case = "it says over how many ranks shards are spread, and --zero 0 or one data-parallel rank has no shards"
    return Problem(asked(c, "zero_shard_size", "zero", "dp"), case, "--zero-shard-size 0")


def _shard_experts(c: RunConfig, f: Facts) -> Problem:
    copies = c.layout.expert_data_ranks
    case = f"the {copies} ranks that hold the same experts are cut into groups of this size, and they must be equal"
    given = asked(c, "zero_shard_size", "ep", *moved(c, "etp"), "tp", "dp")
    return Problem(given, case, f"--zero-shard-size {nearest_divisor(copies, c.layout.zero_shard_size)}")


def _live_weights(c: RunConfig, f: Facts) -> Problem:
    case = "weights are gathered under zero 3 only, elsewhere they are always there"
    return Problem(asked(c, "max_live_parameters", "zero", "dp"), case, "--max-live-parameters 0")


def _live_gradients(c: RunConfig, f: Facts) -> Problem:
    case = "gradients wait for a sum under zero 2 and 3 only, elsewhere all of them are kept"
    return Problem(asked(c, "max_live_gradients", "zero", "dp"), case, "--max-live-gradients 0")


def _sums(c: RunConfig, f: Facts) -> Problem:
    case = "gradients add up in float32 or wider, or in the type of 16-bit weights"
    return Problem(asked(c, "main_grads_dtype", "dtype"), case, "--main-grads-dtype auto")


def _offload_part(c: RunConfig, f: Facts) -> Problem:
    return Problem(asked(c, "optimizer_offload_fraction"), "a share is above 0 and at most 1",
                   "--optimizer-offload-fraction 1.0")  # fmt: skip


def _offload_remainders(c: RunConfig, f: Facts) -> Problem:
    case = "masters on the host are whole, and their weights are not beside them"
    return Problem(asked(c, "optimizer_cpu_offload", "master_remainders"), case, "--master-remainders false")


KINDS = ("state", "weights", "activations")


def _offloads(c: RunConfig) -> bool:
    return c.layout.optimizer_cpu_offload or c.layout.cpu_offloading


def _offload_place(c: RunConfig, f: Facts) -> Problem:
    case = "it is where masters, moments, weights and activations go that are offloaded"
    return Problem(asked(c, "offload_dir"), case, "--optimizer-cpu-offload true, or --cpu-offloading true")


def _offload_kinds(c: RunConfig, f: Facts) -> Problem:
    fix = f"--offload-dir-for {' '.join(KINDS)}"
    return Problem(asked(c, "offload_dir_for"), f"what can go to files is {', '.join(KINDS)}", fix)


def _offload_nowhere(c: RunConfig, f: Facts) -> Problem:
    return Problem(asked(c, "offload_dir_for"), "there is no directory for it", "--offload-dir .")


def _offload_directory(c: RunConfig, f: Facts) -> Problem:
    return Problem(asked(c, "offload_dir"), "there is no such directory", "--offload-dir .")


def _offload_gradients(c: RunConfig, f: Facts) -> Problem:
    case = "gradients live on the host where they are sharded (zero 2 and 3) and stepped there, all of them and by a "
    case += "rule that takes every element alone"
    leaves = ("offload_gradients", "zero", "optimizer_cpu_offload", "optimizer_offload_fraction", "optimizer")
    fix = "--zero 2 --optimizer-cpu-offload true --optimizer-offload-fraction 1.0 --optimizer adamw"
    return Problem(asked(c, *leaves), case, fix)


def _steps_alone(c: RunConfig) -> bool:
    """Whether no rule works on whole matrices."""
    words = (c.optim.optimizer, *(g.rpartition("optimizer=")[2] for g in c.optim.param_groups))
    return not any(word.startswith(("muon", "adafactor")) for word in words)


def _offload_weights(c: RunConfig, f: Facts) -> Problem:
    case = "weights live on the host where they are sharded (zero 3) and stepped there, all of them"
    leaves = ("offload_weights", "zero", "optimizer_cpu_offload", "optimizer_offload_fraction")
    return Problem(asked(c, *leaves), case, "--zero 3 --optimizer-cpu-offload true --optimizer-offload-fraction 1.0")


ZERO_RULES: tuple[Rule, ...] = (
    Rule("shards divide the ranks", ("zero_shard_size", "dp"),
         lambda c, f: c.layout.zero_stage > 0 and c.layout.zero_shard_size > 0
         and c.layout.data_ranks % c.layout.zero_shard_size != 0, _shard_size),
    Rule("shards divide the experts' ranks", ("zero_shard_size", "ep", "etp", "tp", "dp"),
         lambda c, f: isinstance(c.model, MoEConfig) and c.layout.data_ranks % max(c.layout.zero_shard_size, 1) == 0
         and c.layout.expert_data_ranks % c.layout.expert_shard_ranks != 0, _shard_experts),
    Rule("shards to be spread", ("zero_shard_size", "zero", "dp"),
         lambda c, f: c.layout.zero_shard_size > 0 and c.layout.zero_stage == 0, _shard_nothing),
    Rule("weights that come and go", ("max_live_parameters", "zero", "dp"),
         lambda c, f: c.layout.max_live_parameters > 0 and c.layout.zero_stage < 3, _live_weights),
    Rule("gradients that wait", ("max_live_gradients", "zero", "dp"),
         lambda c, f: c.layout.max_live_gradients > 0 and c.layout.zero_stage < 2, _live_gradients),
    Rule("sums of gradients", ("main_grads_dtype", "dtype"),
         lambda c, f: c.layout.main_grads_dtype not in ("auto", c.train.dtype), _sums),
    Rule("a share to offload", ("optimizer_offload_fraction",),
         lambda c, f: not 0.0 < c.layout.optimizer_offload_fraction <= 1.0, _offload_part),
    Rule("masters that can be offloaded", ("optimizer_cpu_offload", "master_remainders"),
         lambda c, f: c.layout.optimizer_cpu_offload and c.optim.master_remainders, _offload_remainders),
    Rule("files of what is offloaded", ("offload_dir", "optimizer_cpu_offload", "cpu_offloading"),
         lambda c, f: bool(c.layout.offload_dir) and not _offloads(c), _offload_place),
    Rule("what goes to files", ("offload_dir_for",),
         lambda c, f: not set(c.layout.offload_dir_for) <= set(KINDS), _offload_kinds),
    Rule("files have a directory", ("offload_dir_for", "offload_dir"),
         lambda c, f: bool(moved(c, "offload_dir_for")) and not c.layout.offload_dir, _offload_nowhere),
    Rule("a directory to offload to", ("offload_dir", "optimizer_cpu_offload", "cpu_offloading"),
         lambda c, f: bool(c.layout.offload_dir) and _offloads(c) and not f.exists(c.layout.offload_dir),
         _offload_directory),
    Rule("gradients that can be offloaded", ("offload_gradients", "zero", "optimizer_cpu_offload",
                                             "optimizer_offload_fraction", "optimizer", "param_groups"),
         lambda c, f: c.layout.offload_gradients and not (c.layout.zero_stage >= 2 and c.layout.offload.fraction == 1
                                                          and _steps_alone(c)), _offload_gradients),
    Rule("weights that can be offloaded", ("offload_weights", "zero", "optimizer_cpu_offload",
                                           "optimizer_offload_fraction"),
         lambda c, f: c.layout.offload_weights and not (c.layout.zero_stage == 3 and c.layout.offload.fraction == 1),
         _offload_weights),
)  # fmt: skip
