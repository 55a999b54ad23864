"""How a layer writes itself."""

import inspect


def call_text(module, *names):
    """Write the call that makes ``module``, from attributes named like its parameters.

    Keyword-only parameters appear where they differ from their defaults.
    """
    parameters = inspect.signature(type(module)).parameters
    parts = []
    for name in names:
        value = getattr(module, name)
        if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            parts.append(repr(value))
        elif value != parameters[name].default:
            parts.append(f"{name}={value!r}")
    return f"{type(module).__name__}({', '.join(parts)})"
