from lockstep.engine import Engine, EngineConfig
from lockstep.engine.sizing.memory_model import MemoryModel
from tests.unit.engine.models import FAMILIES, VOCAB, mesh_of, mixed_requests, model_on


def test_a_pool_takes_what_the_layers_say():
    engine = Engine(EngineConfig(max_seqs=4, page_size=8), mesh_of("1,1,2"), vocab_size=VOCAB)
    engine.prepare(model_on("1,1,2", FAMILIES["gemma3"]), mixed_requests())
    model, sizes = engine.decode_model, engine.sizes
    pool = engine.programs["new_cache"].memory().output_size_in_bytes
    kept = sum(layer.position_bytes(model.kv_dtype) for layer in model.kept)
    assert pool == sizes.pages * sizes.page_size * kept == MemoryModel(model).footprint(sizes).pool
    assert f"{model.heads.kept.describe()} in {model.config.num_layers} layers: " in engine.sizing.describe()
