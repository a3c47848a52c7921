"""The videos on disk: SQLite with a write-ahead log, one thread that writes, and reads that never wait."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from wanrun.errors import UsageError
from wanserve.video import ENDED, Status, Video

_Value = TypeVar("_Value")
Change = Callable[[sqlite3.Connection], Any]

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS videos (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner TEXT NOT NULL,
  status TEXT NOT NULL,
  rank REAL NOT NULL,
  ended REAL,
  bytes INTEGER NOT NULL,
  prompt TEXT NOT NULL,
  idempotency TEXT,
  record BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS by_rank ON videos (status, rank);
CREATE INDEX IF NOT EXISTS by_owner ON videos (owner, number);
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON videos (owner, idempotency) WHERE idempotency IS NOT NULL;
CREATE TABLE IF NOT EXISTS removed (id TEXT PRIMARY KEY) STRICT;
CREATE TABLE IF NOT EXISTS times (name TEXT PRIMARY KEY, seconds REAL NOT NULL) STRICT;
"""


class VideoDatabase:
    """The videos of a server, in a database file.

    Changes go through one thread, which commits those that wait together, and are durable when ``change``
    returns. Reads see the last commit, at once. Raises UsageError if the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changes: queue.SimpleQueue[tuple[Change, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        try:
            self._reader, self._lists = self._connect(), self._connect()
            self._reader.executescript(SCHEMA)
        except sqlite3.Error as error:  # another program's file, or a full disk
            remedy = "give --data another folder"
            raise UsageError(
                "unreadable", f"the database {path} cannot be used", found=error, remedy=remedy
            ) from None
        self._writer = threading.Thread(target=self._write, name="store", daemon=True)
        self._writer.start()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, timeout=30, cached_statements=256
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA temp_store = MEMORY")  # no file elsewhere, whose disk may be full
        connection.execute("PRAGMA synchronous = FULL")  # what was accepted outlives a power cut
        return connection

    async def change(self, change: Callable[[sqlite3.Connection], _Value]) -> _Value:
        """Runs a change in a transaction, and returns its result once that is committed.

        An error of the change, or of the commit, is raised here, and what the change did is undone.
        """
        future: asyncio.Future[_Value] = asyncio.get_running_loop().create_future()
        self._changes.put((change, future))
        return await asyncio.shield(future)

    @property
    def alive(self) -> bool:
        """Whether changes are still written."""
        return self._writer.is_alive()

    def _write(self) -> None:
        connection = self._connect()
        with_end = False
        while not with_end:
            batch = [self._changes.get()]
            while not self._changes.empty():
                batch.append(self._changes.get())
            with_end = None in batch
            _commit(connection, [one for one in batch if one is not None])
        connection.close()

    def close(self) -> None:
        """Writes what waits, and closes the database."""
        self._changes.put(None)
        self._writer.join()
        self._reader.close()
        self._lists.close()

    def find(self, id: str) -> Video | None:
        """Returns the video of an id."""
        return _video(self._reader.execute("SELECT record FROM videos WHERE id = ?", (id,)).fetchone())

    def listed(
        self,
        owner: str | None,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
        statuses: Sequence[str] = (),
        text: str = "",
    ) -> list[Video] | None:
        """Returns videos in the order in which they were accepted, or in the reverse order; from any thread.

        ``after`` is the id of the last video of the page before; returns None if the owner has no such video.
        Lists those of every owner for None, of every state for no ``statuses``, and with the words of
        ``text`` in their prompts.
        """
        where, values = list[str](), list[Any]()
        if owner is not None:
            where, values = ["owner = ?"], [owner]
        if after is not None:
            own = "" if owner is None else " AND owner = ?"
            found = self._lists.execute(f"SELECT number FROM videos WHERE id = ?{own}", (after, *values))
            if (row := found.fetchone()) is None:
                return None
            where.append("number < ?" if newest_first else "number > ?")
            values.append(row[0])
        if statuses:
            where.append(f"status IN ({', '.join('?' * len(statuses))})")
            values += statuses
        for word in text.split():
            where.append("prompt LIKE ? ESCAPE '\\'")
            values.append("%" + word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%")
        order = "DESC" if newest_first else "ASC"
        condition = f"WHERE {' AND '.join(where)}" if where else ""
        rows = self._lists.execute(
            f"SELECT record FROM videos {condition} ORDER BY number {order} LIMIT ?", (*values, limit)
        )
        return [_decode(record) for (record,) in rows]

    def waiting(self) -> list[Video]:
        """Returns the waiting videos, the next one first."""
        return list(videos_with(self._reader, "queued"))

    def times(self) -> dict[str, float]:
        """Returns the measured times by name."""
        return dict(self._reader.execute("SELECT name, seconds FROM times"))


def _commit(connection: sqlite3.Connection, batch: Sequence[tuple[Change, asyncio.Future[Any]]]) -> None:
    """Runs changes in one transaction; one that fails is undone without the others."""
    results = list[tuple[asyncio.Future[Any], Any, BaseException | None]]()
    try:
        connection.execute("BEGIN IMMEDIATE")
        for change, future in batch:
            connection.execute("SAVEPOINT change")
            try:
                results.append((future, change(connection), None))
            except Exception as error:
                connection.execute("ROLLBACK TO change")
                results.append((future, None, error))
            connection.execute("RELEASE change")
        connection.execute("COMMIT")
    except sqlite3.Error as error:  # a full disk: nothing of the batch is there
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        results = [(future, None, error) for _, future in batch]
    for future, value, problem in results:
        future.get_loop().call_soon_threadsafe(_tell, future, value, problem)


def _tell(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():  # whoever asked has gone
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _decode(record: bytes) -> Video:
    return msgspec.json.decode(record, type=Video)


def _video(row: tuple[bytes] | None) -> Video | None:
    return None if row is None else _decode(row[0])


_COLUMNS: Final = ("owner", "status", "rank", "ended", "bytes", "prompt", "idempotency", "record", "id")


def _values(video: Video) -> tuple[Any, ...]:
    """The values of a video by the columns."""
    prompt, record = video.options["prompt"], msgspec.json.encode(video)
    return (
        video.owner,
        video.status,
        video.rank,
        video.ended,
        video.bytes,
        prompt,
        video.idempotency,
        record,
        video.id,
    )


def add(connection: sqlite3.Connection, video: Video) -> None:
    """Stores a new video."""
    marks = ", ".join("?" * len(_COLUMNS))
    connection.execute(f"INSERT INTO videos ({', '.join(_COLUMNS)}) VALUES ({marks})", _values(video))


def put(connection: sqlite3.Connection, *videos: Video) -> None:
    """Stores videos that have changed; one that was removed meanwhile stays away."""
    changes = ", ".join(f"{name} = ?" for name in _COLUMNS[:-1])
    connection.executemany(f"UPDATE videos SET {changes} WHERE id = ?", map(_values, videos))


def with_key(connection: sqlite3.Connection, owner: str, key: str) -> Video | None:
    """Returns the video that an owner has asked for under an idempotency key."""
    found = connection.execute("SELECT record FROM videos WHERE owner = ? AND idempotency = ?", (owner, key))
    return _video(found.fetchone())


def remove(connection: sqlite3.Connection, id: str) -> None:
    """Forgets a video but its id, so that its files are removed even if the server ends before."""
    connection.execute("INSERT OR IGNORE INTO removed VALUES (?)", (id,))
    connection.execute("DELETE FROM videos WHERE id = ?", (id,))


def removed(connection: sqlite3.Connection) -> list[str]:
    """Returns the ids of the videos that were removed."""
    return [id for (id,) in connection.execute("SELECT id FROM removed")]


def forget_removed(connection: sqlite3.Connection) -> None:
    """Forgets the ids of the videos that were removed: their files are."""
    connection.execute("DELETE FROM removed")


def count(connection: sqlite3.Connection, status: Status, owner: str | None = None) -> int:
    """Returns the number of videos in a state, of all owners or of one."""
    own = "" if owner is None else " AND owner = ?"
    values = (status,) if owner is None else (status, owner)
    found = connection.execute(f"SELECT count(*) FROM videos WHERE status = ?{own}", values)
    return int(found.fetchone()[0])


def last_rank(connection: sqlite3.Connection) -> float:
    """Returns the rank of the last video that waits or runs; 0 if there is none."""
    found = connection.execute("SELECT max(rank) FROM videos WHERE status IN ('queued', 'in_progress')")
    return float(found.fetchone()[0] or 0.0)


def videos_with(connection: sqlite3.Connection, status: Status) -> Iterator[Video]:
    """Yields the videos in a state by rank."""
    rows = connection.execute("SELECT record FROM videos WHERE status = ? ORDER BY rank, number", (status,))
    yield from (_decode(record) for (record,) in rows.fetchall())


def ended_videos(connection: sqlite3.Connection) -> list[tuple[str, str, float, int]]:
    """Returns id, state, time of the end and bytes of every video that has ended, the newest first."""
    marks = ", ".join("?" * len(ENDED))
    rows = connection.execute(
        f"SELECT id, status, ended, bytes FROM videos WHERE status IN ({marks}) ORDER BY ended DESC", ENDED
    )
    return [(id, status, float(ended or 0.0), int(size)) for id, status, ended, size in rows]


def put_times(connection: sqlite3.Connection, times: dict[str, float]) -> None:
    """Stores measured times by name."""
    connection.executemany("INSERT OR REPLACE INTO times VALUES (?, ?)", list(times.items()))
