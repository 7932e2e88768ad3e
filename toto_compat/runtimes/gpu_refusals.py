"""Why an engine that was asked for a GPU refuses, from its own words: those of Docker, of NVIDIA's hook and of CDI."""

from toto_compat.environments.engine import GET_TOOLKIT, WITHOUT_IT

# What to do when an engine refuses a GPU, by words of the engine, NVIDIA's hook or CDI; the first that fits.
_REFUSALS = (
    (
        "could not select device driver",
        f"the engine hands out no GPUs: {GET_TOOLKIT} (one that was started before it was installed does not see it)",
    ),
    (
        "unsatisfied condition",
        "the base image asks for a newer driver than the wheel needs: give the environment a plain `base_image` such as"
        " python:3.12-slim in matrix.yaml, or update the driver",
    ),
    ("unknown device", "the engine has no such GPU: `nvidia-smi -L` lists them; check CUDA_VISIBLE_DEVICES"),
    ("driver not loaded", "the NVIDIA driver of the engine's machine is not loaded: `nvidia-smi` there says why"),
    ("version mismatch", "the driver was updated while an older one is loaded: restart the machine"),
    ("libnvidia-ml.so", "the engine's machine has no NVIDIA driver: install it (`apt-get install nvidia-driver`)"),
    (
        "failed to add device rules",
        "the engine may not change control groups, as one without root may not: `nvidia-ctk config --set"
        " nvidia-container-cli.no-cgroups=true --in-place` has the toolkit leave them alone",
    ),
    ("insufficient permissions", "the engine may not open /dev/nvidia*: check their permissions on its machine"),
    (
        "Container Runtime Hook directly",
        "the toolkit is set to another mode than that of this request: `nvidia-ctk config --set"
        " nvidia-container-runtime.mode=legacy --in-place`",
    ),
    ("CDI", "describe the GPUs anew: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"),
    ("nvidia", f"the engine cannot hand out the GPU; it needs the toolkit: {GET_TOOLKIT}"),
)


def advice_on_refusal(text: str) -> str:
    """Say what to do about an engine that refuses a GPU in these words; '' if they speak of something else."""
    advice = (advice for words, advice in _REFUSALS if words.lower() in text.lower())
    found = next(advice, "")
    return f"{found}; {WITHOUT_IT}" if found else ""
