"""What ``__array_namespace_info__`` tells: devices, dtypes and capabilities."""

from rtxarr import _device, dtypes

_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")
API_VERSION = "2025.12"


def check_api_version(api_version: str | None) -> None:
    """Raise ValueError for a version of the standard that is not supported."""
    if api_version not in (None, *_VERSIONS):
        raise ValueError(f"api_version must be one of {', '.join(_VERSIONS)}, got {api_version!r}")


def _refuse_unknown(device) -> None:
    if device is not None:
        _device.device(device)


class NamespaceInfo:
    """Inspection of the namespace, as the array API standard defines it."""

    def capabilities(self) -> dict:
        """Tell what depends on data and how many axes an array may have."""
        return {
            "boolean indexing": True,
            "data-dependent shapes": True,
            "max dimensions": 64,
        }

    def default_device(self) -> _device.Device:
        """Give the device that creation functions use now."""
        return _device.device()

    def default_dtypes(self, *, device=None) -> dict:
        """Give the default dtype of each kind, the same on each device."""
        _refuse_unknown(device)
        return dtypes.default_dtypes()

    def devices(self) -> list[_device.Device]:
        """Give all usable devices."""
        return _device.devices()

    def dtypes(self, *, device=None, kind=None) -> dict:
        """Give the standard's dtypes by name, of one kind or all.

        Parameters
        ----------
        device : Device or str, optional
        kind : str or tuple of str, optional
            As :func:`rtxarr.isdtype` takes it.
        """
        _refuse_unknown(device)
        # float16 and bfloat16 work too, but are not names of the standard.
        known = {n: d for n, d in dtypes.DTYPES.items() if n not in ("float16", "bfloat16")}
        if kind is None:
            return known
        return {name: dtype for name, dtype in known.items() if dtypes.isdtype(dtype, kind)}
