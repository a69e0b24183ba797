"""What the machine does, as MLflow measures and names it: "system/cpu_utilization_percentage", ... .

MLflow's own thread would send these itself, past the spool that keeps a run alive while MLflow is away; so its monitors
are read here and the numbers go the way of all metrics. A reading takes 0.2 ms on CPU.
"""

from contextlib import suppress
from typing import Any

PREFIX = "system/"  # what MLflow's page shows under "System metrics"


class SystemMetrics:
    """CPU, memory, disk, network, and NVIDIA GPUs where `nvidia-ml-py` is installed."""

    def __init__(self) -> None:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        with suppress(ImportError, RuntimeError):  # no nvidia-ml-py, or no GPU
            self._monitors.append(GPUMonitor())

    def read(self) -> dict[str, float]:
        """The numbers now; network traffic is what was sent and received since the run began."""
        values: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            values |= {PREFIX + name: value for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        return values
