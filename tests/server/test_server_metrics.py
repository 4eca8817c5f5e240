import asyncio

from server_client import BASE, TENANT, Client, gradient, running

from planish.server.settings import ServerSettings


async def test_metrics_count_events_and_report_gauges(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_replay_bytes=1)) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        first = await client.sample(await client.sampler(BASE))
        tokens = sum(len(sequence.tokens) for sequence in first.sequences)
        found = await server.metrics()
        counted = found.counters
        assert counted.sampled_tokens == {"everybody": tokens}
        assert counted.prompt_tokens == {"everybody": len(b"hello")}
        assert counted.trained_tokens == {
            "everybody": sum(datum.model_input.length for datum in gradient(model.model_id).data)
        }
        assert counted.accepted_requests == {
            "create_model": 1,
            "forward_backward": 1,
            "optim_step": 1,
            "sample": 1,
        }
        assert counted.answered_requests == {
            (kind, "done"): 1 for kind in counted.accepted_requests
        }
        assert (counted.num_sample_requests, counted.sum_of_running_sequences) == (1, 2)
        assert (
            found.queued_requests,
            found.running_sequences,
            found.waiting_sequences,
            found.running_training_operations,
        ) == ({}, 0, 0, 0)
        assert (found.open_sessions, found.open_models, found.open_samplers) == (1, 1, 1)
        assert found.adapters_in_memory == 1
        assert found.adapter_bytes > 0
        assert found.resident_bytes > 0
        assert found.disk.database_bytes > 0
        assert not found.disk_is_full
        assert (found.checkpoint_bytes, found.unnamed_sampler_bytes) == ({}, 0)
        path = await model.save("a")
        await model.publish()
        found = await server.metrics()
        assert found.checkpoint_bytes == {
            "everybody": (await server.checkpoints.info(TENANT, path)).checkpoint.size_bytes
        }
        while not (await server.metrics()).unnamed_sampler_bytes:
            await asyncio.sleep(0.02)
