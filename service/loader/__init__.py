"""From checkpoint files to leased memory: validated headers, names, streaming reads."""
