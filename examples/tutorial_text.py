"""Write a small model, tokenizer and text for docs/tutorial.md into this folder, without internet.

The text is Python's language reference and the docstrings of its standard library.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = 2048


def read_rows() -> list[str]:
    """Return the text in rows of 2,000 characters."""
    texts = list(topics.values())
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if path.parent.name not in ("test", "tests", "site-packages"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    texts.append(ast.get_docstring(node) or "")
    text = "\n\n".join(each for each in texts if len(each) > 200)
    return [text[i : i + 2000] for i in range(0, len(text), 2000)]


def train_tokenizer(rows: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(rows, words)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def main() -> None:
    rows = read_rows()
    Path("text/python").mkdir(parents=True)
    pq.write_table(pa.table({"text": rows}), "text/python/rows.parquet")
    train_tokenizer(rows).save_pretrained("tokenizer")
    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "vocab_size": WORDS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    }
    Path("config.json").write_text(json.dumps(model))


if __name__ == "__main__":
    main()
