"""Define in one place the log lines that operators search for.

The texts are the same as in the operators' documents, so that ``pm2 logs
distributed_training_miner | grep "Successfully pushed"`` continues to work. Their misspellings
(``Succesfully``) must stay.
"""

from __future__ import annotations

from collections.abc import Mapping

from distributed_training.protocol.types import StepReport

# These have placeholders for values: log.info(SAVING_STATE, outer_step).
SAVING_STATE = "💾 Saving model state locally for epoch %s"
UPLOAD_BLOCKED = (
    "⚠️  UPLOAD BLOCKED: inner_step (%d) < minimum (%d). "
    "Validators will reject this! Waiting for more training steps..."
)
UPLOADING = "🔼 Uploading model and optimizer states to r2 bucket: %s"
UPLOAD_FAILED = "Model state upload failed: %s"
TRAINING_LOOP_FAILED = "Training Loop Failed with error: %s"

FULL_STATE = "Full State"
EXTRACTED_STATE = "Extracted Optimizer & Model State Dict"
UPLOAD_MODEL_START = "Upload Model Start"
AVERAGING_START = "⏳ Starting Pseudo Gradient Averaging.."
ALL_REDUCE_START = "All Reduce Start"
ALL_REDUCE_FINISH = "All Reduce Finish"
ALL_REDUCE_DONE = "AllReduce Operation Finished Succesfully"
SCORE = "The score of uid %d after outer step %d is %.4f"
SLOW_STEP = 60.0  # seconds; an inner step that takes longer prints SLOW STEP
_LOW_GPU_MEMORY = 1.0  # GB of 1e9 bytes; less memory in use prints LOW GPU MEMORY
METADATA_LOGGED = "Metadata Dict Succesfully Logged To Chain."


def counted(count: float, one: str, many: str = "") -> str:
    """Return ``1 block`` or ``2 blocks``. ``many``: the plural, if it is not ``one`` plus an s."""
    return f"{count:.0f} {one if count == 1 else many or f'{one}s'}"


def step_line(report: StepReport) -> str:
    """Return the line for one inner step, as the operators' documents show it.

    ``GPU Mem`` is 0.00GB without a GPU. Loss is in nats per token and time in seconds.
    """
    return (
        f"Outer Step: {report.outer_step} | Inner Step: {report.inner_step} | "
        f"LR: {report.learning_rate:.8f} | Loss: {report.loss:.2f} | "
        f"Step Time: {report.seconds:.1f}s | GPU Mem: {report.gpu_memory_gb or 0.0:.2f}GB"
    )


def throughput_line(report: StepReport) -> str:
    """Return the line with the measured figures that the step line has no room for.

    The operators' documents promise ``Throughput: N samples/sec``.
    """
    parts = [
        f"Throughput: {report.samples_per_second:.2f} samples/sec",
        f"{report.tokens_per_second:.0f} tokens/s",
        f"Data Wait: {report.data_wait_seconds:.1f}s",
    ]
    if report.grad_norm is not None:
        parts.append(f"Grad Norm: {report.grad_norm:.3f}")
    if report.mfu is not None:
        parts.append(f"MFU: {100 * report.mfu:.1f}%")
    if report.gpu_utilization is not None:
        parts.append(f"GPU Util: {report.gpu_utilization:.0f}%")
    if report.note:
        parts.append(report.note)
    return " | ".join(parts)


def step_warnings(report: StepReport, *, expect_gpu: bool = False) -> list[str]:
    """Return the warnings about an inner step.

    ``expect_gpu``: there is a GPU, so also warn about a step that used no GPU memory at all.
    """
    lines = []
    if report.seconds > SLOW_STEP:
        lines.append(f"⚠️  SLOW STEP: {report.seconds:.1f}s (expected 10-30s) - Check GPU usage!")
        if report.gpu_memory_gb is None and not expect_gpu:
            lines[0] = f"⚠️  SLOW STEP: {report.seconds:.1f}s, trained on the CPU."
        if report.data_wait_seconds > report.seconds / 2:
            lines[-1] += f" {report.data_wait_seconds:.1f}s of it were spent waiting for data"
    memory = report.gpu_memory_gb
    # There is a GPU, but torch has allocated no memory on it, so the model must be elsewhere.
    if memory is None and expect_gpu:
        memory = 0.0
    if memory is not None and memory < _LOW_GPU_MEMORY:
        lines.append("⚠️  LOW GPU MEMORY: Model may be on CPU!")
    return lines


def pushed(tag: str, bucket: str) -> str:
    return f"Successfully pushed new model state with tag {tag} to bucket: {bucket}"


def all_reduce_failed(checkpoint: int) -> str:
    """Return the line for a round that failed at ``checkpoint``.

    1 means before the averaging, 2 during it, and 3 in the outer step.
    """
    return f"All Reduce Failed At Checkpoint {checkpoint}"


def describe_losses(losses: Mapping[str, float]) -> str:
    """Return the losses on several domains as text, or an empty string for a single domain."""
    each = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    return f" ({each})" if len(losses) > 1 else ""
