"""Read the file of a fleet: its classes of devices, what each promises, and how a device of it is reached."""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, field_validator

from autotune.errors import ConfigError, nearest
from autotune.fleet.messages import DevicePromise
from autotune.records import yaml_file as yamlfile
from autotune.records.config import Config, Section, StoreName, validate_section
from autotune.units import parse_bytes

ConfigT = TypeVar("ConfigT", bound=Config)


class DeviceClass(Section):
    """Class of equal devices; every property that it names is checked on each of them."""

    engine: Literal["local", "command", "ray"] = "ray"
    """Way to reach a device: `ray` by an actor on a node with the resource, `command` by a command that runs
    `autotune serve` somewhere, `local` on this machine."""
    command: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Command of the engine `command`, whose last words are `autotune serve`: `[ssh, orin-3, autotune, serve]`."""
    resource: str = ""
    """Custom resource of Ray that a node has as often as it has devices of this class; the class's name by default."""
    devices: int = Field(1, ge=1)
    """Number of devices: how many entries of a night run at the same time."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of the device, which replaces the one of the study."""
    name: str = ""
    """Part of the chip's name: `A100`."""
    memory: str | None = None
    """Memory of the device; 5 % less or more is accepted: `80GiB`."""
    cores: int | None = Field(None, ge=1)
    """Physical cores that a process may use; multiprocessors on a GPU."""
    limit: str | None = None
    """Hard memory limit on every process that runs the step: `900MiB`. Of this limit and the study's the lower one is enforced."""
    stores: dict[StoreName, str] | None = None
    """Directories of the stores on these devices, which replace those of the study; `{}` for none."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the measuring processes: `{OMP_NUM_THREADS: "8"}`."""

    @field_validator("memory", "limit")
    @classmethod
    def _check_bytes(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                parse_bytes(text)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return text

    @property
    def promise(self) -> DevicePromise:
        """Properties that each device must have."""
        memory = None if self.memory is None else parse_bytes(self.memory)
        return DevicePromise(self.device, self.name, memory, self.cores)

    def apply(self, config: ConfigT) -> ConfigT:
        """Return the config of a study on this class: its device, the lower of both limits, and its stores."""
        changes: dict[str, object] = {"device": self.device}
        if self.limit is not None:
            asked = getattr(config, "limit", None)
            changes["limit"] = min(filter(None, (self.limit, asked)), key=parse_bytes)
        if self.stores is not None:
            changes["stores"] = self.stores
        fields = {name: getattr(config, name) for name in type(config).model_fields}
        return type(config).model_validate({**fields, **changes})


class FleetConfig(Section):
    """Fleet: classes of devices, and how Ray is reached."""

    classes: dict[str, DeviceClass] = Field(min_length=1)
    """Classes of devices by their names."""
    address: str = "auto"
    """Address of Ray's cluster. Its token stays in `RAY_AUTH_TOKEN_PATH`, never in this file."""
    code: str | None = None
    """Directory with the code of the workloads, which Ray copies to its nodes; by default the nodes have it."""

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, classes: dict[str, DeviceClass]) -> dict[str, DeviceClass]:
        for name, device_class in classes.items():
            if Path(name).name != name or name in (".", "..") or "@" in name:
                raise ValueError(f"class {name!r} is a path, or has an @; give a plain name")
            if (device_class.engine == "command") != bool(device_class.command):
                raise ValueError(
                    f"class {name!r}: `engine: command` and `command: [...]` need each other; write both, or neither"
                )
            if device_class.engine == "local" and device_class.devices > 1:
                raise ValueError(f"class {name!r}: this machine is one device; write devices: 1")
        return classes

    def find(self, name: str) -> DeviceClass:
        """Return a class; ConfigError with the known names for an unknown one."""
        if name not in self.classes:
            raise ConfigError(f"--on {name}: the fleet has no such class{nearest(name, self.classes)}")
        return self.classes[name]


def load_fleet(path: Path) -> FleetConfig:
    """Read and validate the file of a fleet; ConfigError names the file, the line and the first error."""
    document = yamlfile.read(path)
    return validate_section(FleetConfig, document.data, document)
