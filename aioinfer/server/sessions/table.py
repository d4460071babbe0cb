"""The sessions of a server, each of one key."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioinfer.config import ServerConfig
from aioinfer.server.http.failures import Failure, Refused, not_found
from aioinfer.server.owned import Owned

if TYPE_CHECKING:
    from aioinfer.client.sessions import HeldPrefix, Session

__all__ = ["ServedSession", "Sessions"]


class ServedSession:
    """One session.

    ``model`` is the name that it was made with, ``adapter`` and ``cache_salt`` what all its turns have.
    ``first`` are messages that its first turn begins with.
    """

    __slots__ = (
        *(
            "_sessions",
            "adapter",
            "cache_salt",
            "created",
            "first",
            "gone",
            "id",
            "model",
            "owner",
            "session",
        ),
        *("ttl", "turns", "warmed"),
    )

    def __init__(
        self,
        sessions: Sessions,
        owner: str,
        session: Session,
        *,
        model: str,
        adapter: str | None,
        cache_salt: str,
        ttl: float,
        first: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._sessions = sessions
        self.id = f"sess_{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.owner = owner
        self.session = session
        self.model = model
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.ttl = ttl
        self.first = [*first]
        #: holds the KV of these
        self.warmed: HeldPrefix | None = None
        #: begins and ends of turns: an odd number amid one
        self.turns = 0
        #: it was deleted, or has expired
        self.gone = False

    @property
    def busy(self) -> bool:
        """A turn is under way."""
        return self.turns % 2 == 1

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The conversation. On any thread."""
        return [*self.first, *self.session.messages]

    def fork(self) -> ServedSession:
        """Another one with the same past. It is not kept yet."""
        return ServedSession(
            self._sessions,
            self.owner,
            self.session.fork(),
            model=self.model,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
            ttl=self.ttl,
            # Amid a turn that is not read to its end, the past has them already.
            first=() if self.session.num_tokens else self.first,
        )

    def enter(self, seen: int) -> None:
        """A turn begins, of a call that has seen ``turns`` before it looked at anything else. Raises Refused:
        the session is gone (404); a turn is under way, or was at any moment since (409)."""
        if self.gone:
            raise not_found("session", self.id, "session")
        if self.busy or self.turns != seen:
            message = f"the session {self.id} has one turn at a time, and another request takes it"
            raise Refused(Failure(409, "conflict_error", message, param="session", code="session_busy"))
        self.turns += 1
        self._sessions.used(self)

    def leave(self) -> None:
        """The turn has ended, in any way."""
        self._sessions.used(self)
        self.turns += 1
        self._release()
        if self.gone:
            self.session.close()

    def end(self) -> None:
        """Give its memory back; a turn that is under way goes on to its end."""
        self.gone = True
        if not self.busy:
            self._release()
            self.session.close()

    def _release(self) -> None:
        if self.warmed is not None and (self.gone or not self.first):
            self.warmed.release()
            self.warmed = None


class Sessions:
    """Those of all keys. They end with the server."""

    def __init__(self, config: ServerConfig) -> None:
        self._most = config.max_sessions_per_key
        self._owned: Owned[ServedSession] = Owned(
            self._most, forget=ServedSession.end, in_use=lambda session: session.busy
        )
        self.clear = self._owned.clear

    def find(self, owner: str, name: str, param: str | None = None) -> ServedSession:
        """A session of a key. On any thread. Raises Refused: there is none; ``param`` is the field that
        names it."""
        found = self._owned.find(owner, name)
        if found is None:
            raise not_found("session", name, param)
        return found

    def of(self, owner: str) -> list[ServedSession]:
        """Those of a key, that used last comes last."""
        return self._owned.of(owner)

    def left(self, session: ServedSession) -> float:
        """Seconds until it is deleted, if it is not used."""
        return self._owned.left(session.owner, session.id)

    def check_room(self, owner: str) -> None:
        """Raise Refused (429): the key has as many as it may."""
        count = len(self._owned.of(owner))
        if count >= self._most:
            message = f"the key has {count} sessions, its limit (max_sessions_per_key): delete one"
            raise Refused(Failure(429, "rate_limit_error", message, code="session_limit_exceeded"))

    def add(self, session: ServedSession) -> ServedSession:
        """Keep a new session. Raises Refused (429), and has closed it then."""
        try:
            self.check_room(session.owner)
        except Refused:
            session.end()
            raise
        self._owned.add(session.owner, session.id, session, ttl=session.ttl)
        return session

    def remove(self, session: ServedSession) -> None:
        """Delete it."""
        self._owned.remove(session.owner, session.id)

    def used(self, session: ServedSession) -> None:
        """Its time begins anew."""
        self._owned.use(session.owner, session.id)
