"""Every error that `tba` raises on purpose.

    TbaError                    a run cannot go on; its message is one sentence for the user
    ├── UserError (ValueError)  something the user gave is wrong: exit code 2
    │   ├── ConfigError         a setting, or two settings together
    │   ├── DataError           a data file, a row, a prompt
    │   ├── ModelError          a model folder, a tokenizer
    │   ├── UserCodeError       code of the user's own cannot be loaded or broke its contract
    │   └── RunFolderError      a run folder that cannot be used as asked
    ├── WaitTimeoutError        a bounded wait ran out; names who was waited for
    ├── SearcherFailedError     searchers died more often than they may
    ├── AllExcludedError        no trajectory could be scored
    ├── DivergedError           too many steps in a row without a finite gradient
    └── StorageError            the disk refused; what was written before is intact

A message says what failed, the value, what was expected and what to do. Every class is picklable,
since searchers send their errors to the trainer.
"""


class TbaError(Exception):
    """A run cannot go on; the message is one sentence for the user."""


class UserError(TbaError, ValueError):
    """Something the user gave is wrong."""


class ConfigError(UserError):
    """A setting has a wrong value, or two settings exclude each other."""


class DataError(UserError):
    """A data file or one of its rows cannot be used."""


class ModelError(UserError):
    """A model folder or its tokenizer cannot be used."""


class UserCodeError(UserError):
    """Code of the user's own, a reward or an objective, cannot be loaded or broke its contract."""


class RunFolderError(UserError):
    """A run folder cannot be used as asked."""


class WaitTimeoutError(TbaError):
    """A bounded wait ran out."""


class SearcherFailedError(TbaError):
    """Searchers died more often than they may."""


class AllExcludedError(TbaError):
    """No trajectory could be scored, so there is nothing to learn from."""


class DivergedError(TbaError):
    """Too many training steps in a row had no finite loss or gradient."""


class StorageError(TbaError):
    """The disk refused a write; what was written before is intact."""
