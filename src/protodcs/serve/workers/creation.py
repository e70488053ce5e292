"""Create streams: from prototypes, or as another stream was created. Store the vocabularies that streams share."""

from dataclasses import dataclass
from functools import partial

from ...core.vocabulary import Vocabulary
from ...errors import InputError, StoreError, UnknownStreamError, UnknownVocabularyError
from ..messages import Reply, ReplyStatus, Request
from ..store.base import Store
from ..stream.live_stream import StreamSpec
from ..stream.shared import check_vocabulary, unpack_prototypes
from .computing import Computing
from .loaded_streams import LoadedStreams
from .quotas import Quotas, SizeLimits


@dataclass(frozen=True)
class Creation:
    """Creates streams for one worker."""

    store: Store
    quotas: Quotas
    sizes: SizeLimits
    streams: LoadedStreams
    computing: Computing

    async def create(self, request: Request) -> Reply:
        """Create a stream with the prototypes in the request."""
        spec = StreamSpec.unpack(request.payload)
        vocabulary = None
        if spec.vocabulary is not None:
            await self._check_stored(spec.vocabulary)
            vocabulary = await self.streams.vocabulary(spec.vocabulary)
        await self.computing.in_thread(partial(self._check, request, spec, vocabulary))
        return await self._create(request.stream, spec, request.shared)

    async def find_vocabulary(self, request: Request) -> Reply:
        """Reply if a vocabulary is stored."""
        await self._check_stored(request.payload.decode())
        return Reply(ReplyStatus.DONE)

    async def put_vocabulary(self, request: Request) -> Reply:
        """Store a vocabulary, which streams can use from now on."""
        name = request.payload.decode()
        if not await self.store.has_shared(name):
            self.quotas.check(request.stream)
            self.quotas.add(request.stream, len(request.shared))
        await self.store.put_shared(name, request.shared)
        return Reply(ReplyStatus.DONE)

    async def _check_stored(self, name: str) -> None:
        if not await self.store.has_shared(name):
            raise UnknownVocabularyError(
                f"The vocabulary {name} is not stored. Upload it with PUT /v1/vocabularies/{name}, or create the "
                'stream with `"vocabulary": null`.'
            )

    def _check(self, request: Request, spec: StreamSpec, vocabulary: Vocabulary | None) -> None:
        """Raise an error if a stream cannot be created. This runs in a thread."""
        prototypes = unpack_prototypes(request.shared)
        if prototypes.fingerprint != spec.prototypes:
            raise InputError("the prototypes of a new stream are not those that it names")
        self.sizes.check(request.stream, spec, spec.config, *prototypes.unit.shape)
        if vocabulary is not None:
            check_vocabulary(len(vocabulary))
        spec.engine(prototypes.with_vocabulary(vocabulary))

    async def create_like(self, request: Request) -> Reply:
        """Create a stream as another one was, with the prototypes that it uses."""
        spec = StreamSpec.unpack((await self.store.describe(request.payload.decode())).spec)
        prototypes = await self.streams.prototypes(spec)
        self.sizes.check(request.stream, spec, spec.config, *prototypes.unit.shape)
        return await self._create(request.stream, spec)

    async def _create(self, stream: str, spec: StreamSpec, prototypes: bytes = b"") -> Reply:
        """Create a stream, after the prototypes if these may not be stored yet."""
        # Before anything is put: prototypes that no stream uses stay for an hour.
        found = await self._existing(stream, spec)
        if found is not None:
            return found
        packed = spec.pack()
        self.quotas.check(stream)
        self.quotas.add(stream, len(prototypes))
        if prototypes:
            await self.store.put_shared(spec.prototypes, prototypes)
        try:
            created = await self.store.create(stream, packed, *spec.blobs)
        except StoreError:
            if not prototypes:
                raise
            # The blob may have gone meanwhile, with the last stream that used it.
            await self.store.put_shared(spec.prototypes, prototypes)
            created = await self.store.create(stream, packed, *spec.blobs)
        if created:
            self.streams.failed.pop(stream, None)
            self.quotas.add(stream, len(packed))
        found = await self._existing(stream, spec)
        if found is None:
            raise UnknownStreamError(f"the stream {stream!r} was deleted as soon as it was created")
        return found._replace(repeated=not created)

    async def _existing(self, stream: str, spec: StreamSpec) -> Reply | None:
        """Return the reply for a stream that exists already, or None if there is none."""
        try:
            found = await self.store.describe(stream)
        except UnknownStreamError:
            return None
        if found.spec != spec.pack():
            message = f"the stream {stream!r} already exists with different settings"
            return Reply(ReplyStatus.CONFLICT, message, code="stream_exists")
        facts = {**spec.model_dump(), "incarnation": found.incarnation}
        return Reply(ReplyStatus.DONE, repeated=True, facts=facts)
