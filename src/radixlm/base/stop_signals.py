"""The signals that end a server in order."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP, as of a terminal that is closed, unless the program that started
    this one (nohup) has it ignored."""
    found = (signal.SIGTERM, signal.SIGINT)
    hangup: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not on Windows
    is_ignored = hangup is None or signal.getsignal(hangup) == signal.SIG_IGN
    return found if hangup is None or is_ignored else (*found, hangup)
