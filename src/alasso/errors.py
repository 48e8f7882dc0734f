"""The one exception that alasso raises for a mistake its user can mend."""


class AlassoError(ValueError):
    """Something the caller can put right; the message is one sentence that says what and how."""


class DivergedError(AlassoError):
    """Weights or importance are no numbers any more."""
