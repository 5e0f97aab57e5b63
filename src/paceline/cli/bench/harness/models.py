"""Names of the models that ``paceline bench`` brings along; for ``--help``, so no torch."""

from __future__ import annotations

import argparse

MODELS = {
    "mlp": "6 x Linear(2048), 100 MB of gradients",
    "transformer": "TransformerEncoder, d=256, 6 layers, batch 8 x 32",
    "small": "300 x Linear(32), 600 small parameters",
}


def add_model(parser: argparse.ArgumentParser, default: str, *, several: bool) -> None:
    """Add ``--model``, for one model or for several of ours."""
    ours = "; ".join(f"{name}: {text}" for name, text in MODELS.items())
    parser.add_argument(
        "--model",
        default=default,
        metavar="NAME,..." if several else "NAME",
        help=f"{ours}; or MODULE:FUNCTION of your own, which returns a model, or a model and a "
        f"function that makes a batch (default: {default})",
    )
