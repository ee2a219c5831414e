"""Draw the figure of a run."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipes.training.progress import History


def draw_run(
    history: History, final_loss: float, ddp_bytes_per_step: float, title: str, path: Path
) -> None:
    """Write a PNG with the loss and the bytes sent by one rank, over the training steps.

    Args:
        history: of the run.
        final_loss: validation loss of the final weights, nats per token.
        ddp_bytes_per_step: sent by fp32 DDP, for comparison.
        title: of the figure.
        path: of the PNG.
    """
    # without pyplot, which keeps global state and may look for a display
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, traffic = figure.subplots(2, 1, sharex=True)
    loss.plot(history.steps, history.train_loss, color="0.7", label="training, one rank")
    loss.plot(
        history.validation_steps, history.validation_loss, "o-", color="C0", label="validation"
    )
    loss.plot(history.steps[-1:], [final_loss][: len(history.steps)], "*", ms=12, label="final")
    loss.set(title=title, ylabel="loss (nats per token)")
    loss.legend()
    steps_done = [step - history.first_step for step in history.steps]
    ddp_megabytes = [ddp_bytes_per_step * steps / 1e6 for steps in steps_done]
    traffic.plot(history.steps, ddp_megabytes, color="0.7", label="fp32 DDP (computed)")
    traffic.plot(
        history.steps, [sent / 1e6 for sent in history.bytes_sent], color="C1", label="this run"
    )
    traffic.set(xlabel="optimizer step", ylabel="sent by one rank's steps (MB)")
    if max(ddp_megabytes, default=0) > 0:
        # the curves differ a hundredfold: linear below the bytes of one DDP step, so that
        # zero has a place
        traffic.set_yscale("symlog", linthresh=ddp_bytes_per_step / 1e6)
    traffic.legend()
    figure.savefig(path, dpi=120)
