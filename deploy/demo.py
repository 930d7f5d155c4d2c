"""The demo model that ships with Squadron, so that a cluster answers without a download."""

from pathlib import Path


def demo_model_path() -> Path:
    """The folder of the demo model's checkpoint.

    Raises:
        FileNotFoundError: the folder was not installed, or holds no weights.
    """
    path = Path(__file__).parent / "demo_model"
    if not (path / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the demo model is missing: {path} holds no model.safetensors; "
            "train it with `python -m deploy.train_demo --minutes 40`"
        )
    return path
