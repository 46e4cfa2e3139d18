"""A job on many nodes that survives failures.

- The launcher joins the rendezvous (``launcher``, ``worker``, ``overlay``, ``job_secret``, ``notify``).
- The agent runs the ranks of one node (``agent``, ``rank_watch``, ``rank_shutdown``, ``node_failures``). It reads
  their heartbeats, exits and recorders (``heartbeat``, ``exit_reason``, ``hang_detection``, ``flight_recorder``,
  ``stragglers``, ``gpu_errors``), and writes reports (``failure_report``).
- A node meets the others through ``rendezvous``, over ``rendezvous_host``, ``rendezvous_client`` and ``node_links``
  (``reach_check``).
- The server passes ``rendezvous_messages`` on to its jobs (``rendezvous_server``, ``rendezvous_job``, ``key_values``).
- Its decisions about a job need no sockets (``rendezvous_state``, ``membership``, ``node_exclusion``,
  ``pair_check``, ``restart_policy``).
- DiLoCo islands have their own requests at the same server (``islands``).
"""
