"""From logits to tokens: filters, penalties, draws that depend on no layout."""
