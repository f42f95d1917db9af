"""The one error family: a message says what happened, with the figures, and what to do next."""


class OnedeskError(Exception):
    """Base of every error that Onedesk raises on purpose."""


class ModelError(OnedeskError):
    """A checkpoint whose configuration, tensors, tokenizer or template cannot be used."""


class FileError(OnedeskError):
    """A file that is missing, cut short, unreadable, or outside the folders that may be read."""


class MemoryFull(OnedeskError):
    """What is asked for does not fit; raised before anything of it is loaded."""


class RequestError(OnedeskError):
    """A request that cannot be served as it stands: a wrong value, an empty or over-long prompt."""


class Cancelled(OnedeskError):
    """The caller asked to stop while a model was being opened or a prompt was being read."""


class PeerError(OnedeskError):
    """Another engine that does the work for us failed or could not be reached."""
