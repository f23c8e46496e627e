"""What deserves a warning about a layout, each with its reason. PURE."""

from __future__ import annotations

from isotron.planner.job import Job

BUBBLE = 0.10  # of a step; above it a warning
FEW_TOKENS = 512  # a microbatch per rank below this does not fill a device


def warnings(job: Job, node: int, bubble: float | None = None) -> list[str]:
    """Sentences about a job on nodes of `node` devices; `bubble` as a fraction of the step, where it is known."""
    layout, m = job.layout, job.microbatches
    found = []
    if layout.tp > node:
        found.append(
            f"--tp {layout.tp}: its two sums per block leave the node of {node} devices, over links many times slower; "
            f"--tp {node} or less keeps them inside"
        )
    elif node % layout.tp:
        found.append(f"--tp {layout.tp} does not divide the node of {node} devices, so some groups span two nodes")
    if layout.pp > 1 and m < layout.stages:
        found.append(
            f"{m} microbatches for {layout.stages} pipeline stages: some stages are always idle; a larger "
            f"--global-batch-size, a smaller --micro-batch-size or fewer --dp ranks give more"
        )
    if bubble is not None and bubble > BUBBLE:
        found.append(
            f"the pipeline is idle for {bubble:.0%} of the step; more microbatches, --vpp or --schedule zbv shorten it"
        )
    if layout.zero == 1 and job.dp == 1:
        found.append("--zero 1 with --dp 1 shards nothing: there is one owner of the optimizer's state")
    if layout.zero == 0 and job.dp > 1:
        found.append(f"--zero 0 with --dp {job.dp}: every rank keeps all masters and moments; --zero 1 shards them")
    if layout.tp > 1 and not layout.sequence_parallel:
        found.append(
            "--tp without --sequence-parallel: norms and residuals are whole on every rank, at no gain in communication"
        )
    if layout.recompute == "full" and layout.pp == 1 and job.micro_batch > 1:
        found.append("--recompute full computes a third more; a smaller microbatch may fit without it")
    if job.tokens < FEW_TOKENS:
        found.append(f"{job.tokens} tokens per microbatch: matrix products this small do not fill a device")
    if layout.stages > 1 and job.config.num_layers % layout.stages:
        found.append(f"{job.config.num_layers} layers over {layout.stages} stages: the fuller stages set the pace")
    return found
