"""Search in a folder of one's own files: an index of passages, and answers that cite them."""

from webgemma.search.answering import Citations, check_citations, question_messages
from webgemma.search.embedding import Embedder
from webgemma.search.index import Index
from webgemma.search.indexing import Update, update_index
from webgemma.search.lock import index_lock
from webgemma.search.retrieval import Passage, find_passages

__all__ = [
    "Citations",
    "Embedder",
    "Index",
    "Passage",
    "Update",
    "check_citations",
    "find_passages",
    "index_lock",
    "question_messages",
    "update_index",
]
