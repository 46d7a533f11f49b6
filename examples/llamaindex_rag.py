"""LlamaIndex: an index of documents whose vectors and answers come from two servers.

Start `radixlm serve` and `radixlm serve zoo/models/radix-tiny-embed --port 30001` first.
"""

import os

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

chat_url = os.environ.get("RADIXLM_URL", "http://127.0.0.1:30000")
embed_url = os.environ.get("RADIXLM_EMBED_URL", "http://127.0.0.1:30001")
llm = OpenAILike(
    model="radix-tiny", api_base=f"{chat_url}/v1", api_key="none",
    is_chat_model=True, context_window=4096, temperature=0,
)  # fmt: skip
vectors = OpenAILikeEmbedding("radix-tiny-embed", api_base=f"{embed_url}/v1", api_key="none")

answer = llm.chat([ChatMessage(role="user", content="What is 17 + 25?")])
print(answer.message.content)
assert answer.message.content == "42"

texts = ["Anna lives in Rome.", "The pet of Anna is a dog.", "Tom is 45 years old."]
index = VectorStoreIndex.from_documents(
    [Document(text=text) for text in texts], embed_model=vectors
)
template = PromptTemplate("Read the text and answer.\n\n{context_str}\n\n{query_str}")
engine = index.as_query_engine(llm=llm, similarity_top_k=2, text_qa_template=template)
found = engine.query("How old is Tom?")
print([node.text for node in found.source_nodes], "->", found)
assert "45" in str(found)
