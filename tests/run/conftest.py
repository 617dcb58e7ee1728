from ..commands import rules_of_this_machine as measured  # noqa: F401
