"""Text in and out: tokenizers and prompts."""

from lockstep.text.prompts import MAX_LINE_BYTES as MAX_LINE_BYTES
from lockstep.text.prompts import Prompt as Prompt
from lockstep.text.prompts import PromptFields as PromptFields
from lockstep.text.prompts import PromptFormat as PromptFormat
from lockstep.text.prompts import encode as encode
from lockstep.text.prompts import iter_prompts as iter_prompts
from lockstep.text.prompts import read_prompts as read_prompts
from lockstep.text.prompts import text_message as text_message
from lockstep.text.prompts import warn_of_texts as warn_of_texts
from lockstep.text.stop import StopFinder as StopFinder
from lockstep.text.stop import cut_at_stop as cut_at_stop
from lockstep.text.stop import warn_of_no_end as warn_of_no_end
from lockstep.text.tokenize import count_appended as count_appended
from lockstep.text.tokenizer import check_vocab as check_vocab
from lockstep.text.tokenizer import decode as decode
from lockstep.text.tokenizer import fetch_tokenizer as fetch_tokenizer
from lockstep.text.tokenizer import load_tokenizer as load_tokenizer
from lockstep.text.tokenizer import special_tokens as special_tokens
from lockstep.text.tokenizer import stop_ids as stop_ids
from lockstep.text.tokenizer import token_count as token_count
from lockstep.text.tokenizer import token_texts as token_texts
from lockstep.text.tokenizer import tokenizer_digest as tokenizer_digest
from lockstep.text.tokenizer import write_tokenizer as write_tokenizer
