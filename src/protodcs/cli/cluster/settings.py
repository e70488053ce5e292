"""The section `cluster` of a file of settings."""

from pydantic import Field

from ...core.settings import Settings


class ClusterSettings(Settings):
    """How many processes and encoders a cluster has, and what Ray reserves for each.

    >>> ClusterSettings().processes
    1
    """

    processes: int = Field(
        1, ge=1, le=1000, description="Processes of the service. Number n listens on `port` + n of its machine."
    )
    cpus: float = Field(1.0, ge=0, description="CPU cores that Ray reserves for each process.")
    encoders: int = Field(
        0, ge=0, description="Number of encoders that all processes share. 0: each process has one of its own."
    )
    encoder_cpus: float = Field(1.0, ge=0, description="CPU cores that Ray reserves for each encoder.")
    encoder_gpus: float = Field(0.0, ge=0, description="GPUs that Ray reserves for each encoder.")
    encoder_batch_wait: float = Field(
        0.005, ge=0, le=1, description="Time for which a batch waits for images of other processes. Seconds."
    )
