"""Makes the service's log safe: no control characters from a client, and never the token."""

from __future__ import annotations

import logging
import re

# C0 except tab and newline, DEL and C1, which move a terminal's cursor, change its colours or answer for its user; and
# characters that reorder text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class SafeFormatter(logging.Formatter):
    """Formats a record as `formatter` does, then escapes control characters and removes the secret."""

    def __init__(self, formatter: logging.Formatter | None, secret: str | None) -> None:
        super().__init__()
        self._formatter = formatter or logging.Formatter()
        self._secret = secret

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the lines of its traceback if there is one."""
        text = self._formatter.format(record)
        if record.exc_info is None and record.stack_info is None:
            text = text.replace("\n", "\\n")
        if self._secret:
            text = text.replace(self._secret, "***")
        return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)


def make_log_safe(secret: str | None) -> None:
    """Give every handler of the process's log this formatter."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(SafeFormatter(handler.formatter, secret))
