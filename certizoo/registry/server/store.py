"""The location of MLflow's rows and files, and the client that connects to it.

A project without a server uses `mlflow.db` (SQLite) and `mlartifacts/` in the current folder. An explicit `uri` has
priority, then the environment variable MLFLOW_TRACKING_URI.
"""

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from certizoo import UserError
from certizoo.registry.server import credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # MLflow's own defaults wait several minutes for a server that does not answer. Training must not.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_UV_AUTO_DETECT": "false",
}
# Errors of MLflow that repetition does not change; any other counts as "does not answer, try again later".
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}

FOREIGN_NAME = "Invalid Host header"  # MLflow's answer to a request under a host name that it was not told
PLAIN = re.compile(r"[\w./:+-]{1,200}", re.ASCII)
RACED = re.compile("UniqueViolation|UNIQUE constraint failed|Duplicate entry")  # PostgreSQL, SQLite, MySQL
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Away(UserError):
    """The tracking server or database does not answer."""


class Full(UserError):
    """One of our files could not be written."""


def use_defaults() -> None:
    """Set the environment before the first `import mlflow`; variables that the user has set stay."""
    for key, value in DEFAULTS.items():
        os.environ.setdefault(key, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # one line per migration of a fresh database
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # one line per retry


def resolve_uri(uri: str | None = None) -> str:
    """Return the tracking URI: the argument, else MLFLOW_TRACKING_URI, else `mlflow.db` in the current folder."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}mlflow.db"
    return f"{SQLITE}{database(uri)}" if uri.startswith(SQLITE) else uri


def database(uri: str) -> Path:
    """Return the absolute path of a SQLite URI's file."""
    return Path(uri.removeprefix(SQLITE)).absolute()


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def artifact_root(uri: str) -> Path | None:
    """Return the local artifact folder of a resolved URI; None if a server decides."""
    if is_server(uri):
        return None
    return (database(uri).parent if uri.startswith(SQLITE) else Path.cwd()) / "mlartifacts"


def public(uri: str) -> str:
    """Return the URI without user name and password, fit for a message or a file."""
    return credentials.without(uri)


def agreed_uri(uri: str | None, meant_for: str | None, run_dir: Path) -> str:
    """Return the server for what waits in `run_dir`: `uri`, else this person's (MLFLOW_TRACKING_URI, the default).

    A run folder may come from someone else, so the server that it was `meant_for` decides nothing. If no server was
    named and the run was meant for another than the default, an error asks for one.
    """
    target = resolve_uri(uri)
    said = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not said and meant_for and meant_for != public(target):
        raise UserError(
            f"{run_dir} is meant for {meant_for}, but no server is set here; give --uri, or set "
            "MLFLOW_TRACKING_URI (this folder's own database: --uri sqlite:///mlflow.db)"
        )
    return target


def connect(uri: str | None = None) -> "MlflowClient":
    """Return a client for `uri`. A SQLite database is created here, by one process at a time."""
    use_defaults()
    from mlflow import MlflowClient

    uri = resolve_uri(uri)
    if not uri.startswith(SQLITE):
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    database(uri).parent.mkdir(parents=True, exist_ok=True)
    with locked(database(uri).parent):  # processes that migrate one fresh SQLite file together break it
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_registered_models("name = ''", max_results=1)  # nothing: with a model, MLflow walks its versions
    return client


def experiment_id(client: "MlflowClient", name: str) -> str:
    """Return the id of the experiment `name`, created once.

    In a race, `mlflow.set_experiment` logs to "Default".
    """
    from mlflow.exceptions import MlflowException

    root = artifact_root(client.tracking_uri)
    location = (root / re.sub(r"[^\w-]", "_", name, flags=re.ASCII)).as_uri() if root else None
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException as error:
            found = client.get_experiment_by_name(name)  # another process was faster
            if found is None:
                raise error
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def is_refusal(error: Exception) -> bool:
    """Return True if sending again cannot help: MLflow refused, the file is missing, or we refuse it ourselves."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return True
    return isinstance(error, FileNotFoundError | ValueError) or getattr(error, "error_code", None) in REFUSALS


def reason(error: Exception) -> str:
    """Return the reason in a few words: the system's own for a failed connection, else the message's first line."""
    system = re.search(r"\[Errno -?\d+\] [\w ]+|[Rr]ead timed out|[Cc]onnect timeout", str(error))
    return system[0] if system else credentials.without(next(iter(str(error).splitlines()), type(error).__name__))[:300]


def trouble(uri: str, error: Exception) -> str:
    """Describe the fault of a server that does not serve."""
    if FOREIGN_NAME in str(error):
        return (
            f"MLflow at {public(uri)} answers, but not to that name: on its machine set MLFLOW_SERVER_ALLOWED_HOSTS to "
            "its names as clients call it (mlflow server --allowed-hosts), or call it by its private address"
        )
    return f"MLflow at {public(uri)} does not answer ({reason(error)})"


@contextmanager
def one_line(uri: str) -> Iterator[None]:
    """Turn MLflow's exceptions into a `UserError`, or into `Away` if `uri` does not answer."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if isinstance(error, OSError) and error.errno in FULL:
            where = error.filename or "a file"
            raise Full(f"{where} cannot be written ({error.strerror}); free some space, then try again") from error
        if is_refusal(error):
            raise UserError(f"MLflow at {public(uri)} refuses: {reason(error)}") from error
        raise Away(f"{trouble(uri, error)}; start it, or name another by --uri or MLFLOW_TRACKING_URI") from error


@contextmanager
def as_global(uri: str) -> Iterator[None]:
    """Make `uri` MLflow's global one: its SQL registry looks a logged model up there and ignores the client's."""
    import mlflow

    before, variable = mlflow.get_tracking_uri(), os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)  # this also writes the variable
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        if variable is not None:
            os.environ["MLFLOW_TRACKING_URI"] = variable


def found(look_up: Any, *key: str) -> Any:
    """Return what a look-up of the client finds, None if it finds nothing."""
    from mlflow.exceptions import MlflowException

    try:
        return look_up(*key)
    except MlflowException as error:
        if not is_refusal(error):
            raise
        return None


def put(setter: Callable[..., None], *entry: str) -> None:
    """Call a setter of the client, once more where another process made the same entry at the same moment.

    MLflow looks for the entry and then inserts it, which one of two writers cannot do; the second call finds it.
    """
    from mlflow.exceptions import MlflowException

    try:
        setter(*entry)
    except MlflowException as error:
        if not RACED.search(str(error)):
            raise
        setter(*entry)


def query(name: str | None = None, equal: Mapping[str, str] = MappingProxyType({}), *more: str) -> str:
    """Return a filter for versions of the model `name` whose tags have these values, for MLflow's search.

    Names and values may come from someone else. A value that MLflow's parser might take for syntax is left out: the
    answer then holds more versions, among which the caller chooses.
    """
    quote = '"' if "'" in (name or "") else "'"
    named = [] if name is None else [f"name = {quote}{name}{quote}"]
    return " and ".join([*named, *more, *(f"tags.`{key}` = '{v}'" for key, v in equal.items() if PLAIN.fullmatch(v))])


def every(page: Any, **query: Any) -> Iterator[Any]:
    """Iterate over all results of a paged search method of the client."""
    token = None
    while True:
        results = page(**query, page_token=token)
        yield from results
        token = results.token
        if not token:
            return


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other processes that lock the same folder; the system releases the lock of a dead process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError, ImportError):  # Windows and some network file systems have no such locks
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
