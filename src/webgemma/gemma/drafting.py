"""Drafts of a drafter, recorded: what follows the next token of each conversation, perhaps.

A drafter reads its target's states, embeddings, keys and values, and has a table of conversations
of its own: in each of its steps, every conversation has one row, at the same position."""

import math
from collections.abc import Mapping

from webgemma.gemma.config import CENTROIDS, POST_PROJECTION, PRE_PROJECTION, Drafter
from webgemma.gemma.gpu_sampler import CHUNK, THREADS, Conversations
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import DrafterModel, Model
from webgemma.graph import BufferPool, Recorder, Tensor

LANES, SOFTWARE_LANES = 8, 1  # threads that share a token of a cluster


class Drafting:
    """The drafts of conversations on some slots, and what they are made of."""

    def __init__(
        self,
        model: Model,
        drafter: DrafterModel,
        conversations: Tensor,
        caches: Mapping[int, LayerCache],
        *,
        kv: str,
        precision: str,
        slots: int,
    ) -> None:
        """`conversations` and `caches` are those of the target, `model`."""
        self.model = model
        self.drafter = drafter
        self.batch = conversations
        config = drafter.config
        donors = enumerate(drafter.drafter_config.donors, len(config.layers))
        self.caches = {number: caches[donor] for number, donor in donors}
        self.kv, self.precision = kv, precision
        self.memory = BufferPool(model.device)
        # The state after the last token that each slot has read.
        self.states = self.memory.tensor(slots, model.config.width, label="states")
        self._table = Conversations(model.device, self.memory).tensor

    def copy_states(self, other: "Drafting") -> None:
        """Copy the states of other slots, which are the first of these."""
        nbytes = other.states.nbytes
        self.memory.device.copy(other.states.buffer, self.states.buffer, nbytes)

    def keep(
        self, recorder: Recorder, x: Tensor, results: Tensor, norm: Tensor | None = None
    ) -> None:
        """Record keeping the states of rows x that were sampled from; with a norm, they get it."""
        rows, width = x.shape
        recorder.call(
            "keep_states",
            (rows,),
            batch=self.batch,
            results=results,
            x=x,
            w=norm or self.model.vector("output_norm.weight"),
            states=self.states,
            width=width,
            eps=self.model.config.eps,
            NORMED=norm is not None,
            THREADS=THREADS,
        )

    def record(self, recorder: Recorder, rows: int, line: int) -> None:
        """Record drafts for conversations that have `line` rows each, of so many."""
        count, width = rows // line, self.model.config.width
        u = recorder.scratch(count, 2 * width)
        recorder.call(
            "begin_drafts",
            (count,),
            batch=self.batch,
            states=self.states,
            drafting=self._table,
            u=u,
            width=width,
            LINE=line,
            THREADS=THREADS,
        )
        for ahead in range(1, line):
            text = _DraftRecorder(self, recorder, count, u)
            y = text.body()
            text.choose(y, ahead)
            if ahead + 1 < line:
                text.linear(y, self.drafter.matrices[POST_PROJECTION], u, width)

    @property
    def inputs(self) -> Inputs:
        """What the drafter's steps read: its own table, and the target's caches."""
        return Inputs(self._table, None, self.caches)

    def close(self) -> None:
        """Free the memory."""
        self.memory.close()


class _DraftRecorder(TextRecorder):
    """Records one draft of each conversation."""

    def __init__(self, drafting: Drafting, recorder: Recorder, rows: int, u: Tensor) -> None:
        """`u` [rows, 2 * the target's width] holds the states in its right half."""
        super().__init__(
            drafting.drafter, recorder, drafting.inputs, rows, drafting.kv, drafting.precision
        )
        self.drafting = drafting
        self.drafter: Drafter = drafting.drafter.drafter_config
        self.u = u

    def embedding(self) -> Tensor:
        """Record W_pre [√d · E[token], state], with the target's embedding."""
        target = self.drafting.model
        table = target.matrices["token_embd.weight"]
        self.lookup(table, None, math.sqrt(target.config.width), self.u)
        return self.linear(self.u, self.model.matrices[PRE_PROJECTION])

    def layer_input(self, index: int) -> Tensor:
        """Return a scratch tensor for what a layer reads, or the head and the next state."""
        if index < len(self.config.layers):
            return super().layer_input(index)
        if self.drafter.centroids:  # whose candidates are read one by one
            return self.scratch(self.rows, self.config.width)
        return self.input_for(self.config.width, self.model.head.name, POST_PROJECTION)

    def choose(self, y: Tensor, ahead: int) -> None:
        """Record the likeliest tokens as drafts, so many tokens ahead."""
        bests = self._centroid_bests(y) if self.drafter.centroids else self._bests(y)
        self.recorder.call(
            "draft_token",
            (self.rows,),
            batch=self.drafting.batch,
            drafting=self.batch,
            bests=bests,
            count=bests.shape[1],
            AHEAD=ahead,
            THREADS=THREADS,
        )

    def _bests(self, y: Tensor) -> Tensor:
        """Record the best token of each chunk of the vocabulary: [rows, chunks, 2]."""
        vocab = self.config.vocab
        bests = self.scratch(self.rows, -(-vocab // CHUNK), 2)
        self.recorder.call(
            "chunk_best",
            (bests.shape[1], self.rows),
            logits=self.head(y),
            bests=bests,
            vocab=vocab,
            CHUNK=CHUNK,
            THREADS=THREADS,
        )
        return bests

    def _centroid_bests(self, y: Tensor) -> Tensor:
        """Record the best token of each of the nearest clusters: [rows, parts * clusters, 2]."""
        table, clusters = self.model.head, self.drafter.centroids
        ordering = self.drafting.drafter.ordering
        assert ordering is not None
        scores = self.linear(y, self.model.matrices[CENTROIDS])
        bests = self.scratch(self.rows, len(table.parts) * clusters, 2)
        for number, part in enumerate(table.parts):
            self.recorder.call(
                "centroid_best",
                (clusters, self.rows),
                **table.arguments(part),
                scores=scores,
                ordering=ordering,
                y=y,
                bests=bests,
                first_row=part.first_row,
                rows=part.rows,
                nearest=self.drafter.nearest,
                size=self.config.vocab // clusters,
                first=number * clusters,
                stride=bests.shape[1],
                LANES=SOFTWARE_LANES if self.software else LANES,
                THREADS=64,
            )
        return bests
