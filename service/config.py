"""The one configuration: onedesk.toml of the tree, with defaults for everything. Unknown keys are errors."""

from __future__ import annotations
