"""What deserves a warning about a layout, each with its reason. PURE."""

from __future__ import annotations

from isotron.core.parallel.plan import split_layers
from isotron.core.parallel.split import counts_of, model_costs
from isotron.planner.job import Job

BUBBLE = 0.10  # of a step; above it a warning
FEW_TOKENS = 512  # a microbatch per rank below this does not fill a device
SHORT_PART = 4096  # tokens of a context-parallel rank below which its keys' way around is not hidden


def warnings(job: Job, node: int, bubble: float | None = None) -> list[str]:
    """Sentences about a job on nodes of `node` devices; `bubble` as a fraction of the step, where it is known."""
    layout = job.layout
    bubble = expected_bubble(job) if bubble is None else bubble
    found = [*_sharing(job, node)]
    if layout.tp > node:
        found.append(
            f"--tp {layout.tp}: its two sums per block leave the node of {node} devices, over links many times slower; "
            f"--tp {node} or less keeps them inside"
        )
    elif node % layout.tp:
        found.append(f"--tp {layout.tp} does not divide the node of {node} devices, so some groups span two nodes")
    found += contradictions(job)
    if bubble is not None and bubble > BUBBLE:
        found.append(
            f"the pipeline is idle for {bubble:.0%} of the step; more microbatches, --vpp or --schedule zbv shorten it"
        )
    if layout.zero == 0 and job.dp > 1:
        found.append(f"--zero 0 with --dp {job.dp}: every rank keeps all masters and moments; --zero 1 shards them")
    if layout.tp > 1 and not layout.sequence_parallel:
        found.append(
            "--tp without --sequence-parallel: norms and residuals are whole on every rank, at no gain in communication"
        )
    if layout.recompute == "full" and layout.pp == 1 and job.micro_batch > 1:
        found.append("--recompute full computes a quarter more; a smaller microbatch may fit without it")
    if job.tokens < FEW_TOKENS:
        found.append(f"{job.tokens} tokens per microbatch: matrix products this small do not fill a device")
    if layout.stages > 1 and job.config.num_layers % layout.stages:
        found.append(f"{job.config.num_layers} layers over {layout.stages} stages: the fuller stages set the pace")
    return found


def contradictions(job: Job) -> list[str]:
    """What makes no sense on any device: ranks that can never be busy, shards of one part."""
    layout, m, found = job.layout, job.microbatches, []
    if layout.pp > 1 and m < layout.stages:
        found.append(
            f"{m} microbatches for {layout.stages} pipeline stages: some stages are always idle; a larger "
            f"--global-batch-size, a smaller --micro-batch-size or fewer --dp ranks give more"
        )
    if layout.zero >= 1 and job.data_ranks == 1:
        owner = "there is one owner of the optimizer's state"
        found.append(f"--zero {layout.zero} with --dp 1 shards nothing: {owner}; leave --zero out")
    if layout.stages > job.config.num_layers and 0 in counts_of(
        split_layers(job.config.num_layers, layout, model_costs(job.config))
    ):
        found.append(
            f"{layout.stages} pipeline stages for {job.config.num_layers} layers: some stages hold no layer; "
            f"a smaller --pp or --vpp"
        )
    return found


def expected_bubble(job: Job) -> float | None:
    """Idle part of a step from the published formula of the schedule; None for schedules whose tables say more."""
    p, v = job.layout.pp, job.layout.chunks
    if p == 1 or job.layout.schedule_name not in ("1f1b", "gpipe", "interleaved"):
        return None
    return (p - 1) / (v * job.microbatches + p - 1)


def _sharing(job: Job, node: int) -> list[str]:
    """What is sharded or dealt, and over how much of the network."""
    layout, found = job.layout, []
    if layout.ep * layout.expert_tp > node and layout.ep > 1:
        found.append(
            f"--ep {layout.ep}: tokens leave the node of {node} devices for their experts in every block, forward and "
            f"backward; --ep {max(1, node // layout.expert_tp)} or less keeps them inside"
        )
    if layout.zero_stage >= 2 and layout.pp > 1:
        what = "weights and gradients" if layout.zero_stage == 3 else "gradients"
        found.append(
            f"--zero {layout.zero} with --pp {layout.pp}: {what} of every stage are sent for each of the "
            f"{job.microbatches} microbatches; --zero 1 sends them once, and so does a budget of what may stay: "
            f"--max-live-gradients" + (" and --max-live-parameters" if layout.zero_stage == 3 else "")
        )
    if layout.cp > 1 and job.seq // layout.cp < SHORT_PART:
        found.append(
            f"--cp {layout.cp}: {job.seq // layout.cp} tokens of a sequence on a rank are too few to hide the way of "
            f"their keys; a smaller --cp and a larger --dp send less"
        )
    return found
