"""What a result says of its machine: pydantic models of the objects inside a record.

A record keeps these as plain objects, so that a later version may add keys; the models check the keys
that readers use. Everything else in them passes through untouched.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Number = int | float


class _Facts(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Device(_Facts):
    """The device that did the work.

    Attributes:
        name, key: as the driver calls it; as ``data/devices.json`` does, "cpu" for the processor.
        capability: compute capability such as "8.6"; None for a processor.
        driver, cuda_driver, cuda: driver; newest CUDA that it runs; CUDA of torch.
        power_limit_w: watts at which the card caps itself; None where it does not say.
    """

    name: str | None = None
    key: str = "unknown"
    capability: str | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    cuda: str | None = None
    power_limit_w: Number | None = None


class Commit(_Facts):
    """The checkout: ``dirty`` when its files differ from the commit ``id``."""

    id: str
    dirty: bool


class Software(_Facts):
    """Versions by package; None for the commit where there is no git."""

    versions: dict[str, str] = Field(default_factory=dict)
    commit: Commit | None = None
    system: str = ""


class Clocks(_Facts):
    """One reading, such as "before" or "after"; ``unread`` says why there is none."""

    when: str = ""
    sm_mhz: Number | None = None
    memory_mhz: Number | None = None
    temperature_c: Number | None = None
    power_w: Number | None = None
    power_limit_w: Number | None = None
    throttle_reasons: list[str] | None = None
    unread: str = ""


COUNTS = ("requests", "sectors", "bytes", "wavefronts", "faults")
"""What the counts of an emulated entry hold at least."""


class _Counts(_Facts):
    requests: Number
    sectors: Number
    bytes: Number
    wavefronts: Number
    faults: Number


def _kept(model: type[BaseModel]) -> AfterValidator:
    """Check an object against ``model`` and keep it as it came."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        model.model_validate(value)
        return value

    return AfterValidator(check)


def _counts(value: dict[str, Any]) -> dict[str, Any]:
    if value:
        _Counts.model_validate(value)
    return value


DeviceFacts = Annotated[dict[str, Any], _kept(Device)]
SoftwareFacts = Annotated[dict[str, Any], _kept(Software)]
ClocksFacts = Annotated[dict[str, Any], _kept(Clocks)]
CountsFacts = Annotated[dict[str, Any], AfterValidator(_counts)]
Sample = Annotated[float, Field(allow_inf_nan=False)]
