// The miner under pm2:
//
//   pm2 start app.config.js                    the miner
//   DT_APP=network DT_FLAGS=lab pm2 start app.config.js   the programs of the network in folder lab (dt-network
//                                              run lab); DT_APP=validator or DT_APP=registry: only one of them
//   DT_NAME=two pm2 start app.config.js        a second miner here; its .env and override are in two/
//   DT_NETWORK=local pm2 start app.config.js   a miner of a subnet on this machine (see `make run`), whose
//                                              flags are in DT_FLAGS and keys in the environment
//   pm2 logs distributed_training_miner
//   pm2 stop distributed_training_miner        finishes the micro-batch, checkpoints, exits 0
//
// Next to the miner it starts distributed_training_page, the dashboard, which runs on while the miner is
// stopped, refused or gone. It may be deleted: a miner without it serves the dashboard itself.
//
// Keys and other secrets belong in .env, never here. `python neurons/miner.py --help` lists
// the usual flags; an unknown one is an error that names the nearest known one.

const flags = [
  // Better in miner.toml next to .env, which the doctor and scripts/score.py read too: what stands here
  // wins over it.
  // ["--network", "network.toml"],               needed, here, there, or DT_NETWORK in .env: its file, URL or name
  // ["--wallet.name", "default"],                or BT_WALLET_NAME, BT_WALLET_HOTKEY in .env
  // ["--wallet.hotkey", "default"],
  // ["--dht.port", "8009"],                      over hivemind peers average here: reachable from outside
  // ["--neuron.local_batch_size_train", "1"],    default: auto, as much as fits
  // ["--neuron.stop_timeout", "60"],             seconds; pm2's kill_timeout below follows it
  // ["--nproc_per_node", "4"],                   default: one rank per visible GPU
  // ["--dht.external_port", "48009"],            where the outside port is another than 8009
];

// ------------------------------------------------------------------------------------------------

const { spawnSync } = require("child_process");
const crypto = require("crypto");
const fs = require("fs");
const path = require("path");

// Where .env, the override and the run folder are: scripts/update.sh starts other versions from
// folders of their own. The override is yours, so that `git pull` never meets your settings: it
// exports more rows, module.exports = [["--wallet.name", "mine"]]. DT_FLAGS holds words, quoted as
// in a shell. Later flags win. Flags of another program are all in its own file, validator.override.js or
// registry.override.js (`dt-network run lab --print` shows them), network.override.js.
const name = process.env.DT_NAME || "";
if (!/^[\w-]*$/.test(name)) throw new Error(`DT_NAME ${name} is no name: give letters, digits, _ or -`);
const home = process.env.DT_HOME || path.join(__dirname, name);
if (!fs.existsSync(home)) throw new Error(`${home} is not there: it holds .env and app.config.override.js of ${name}`);
const app = process.env.DT_APP || "miner";
const programs = {
  miner: "neurons/miner.py",
  validator: "neurons/validator.py",
  registry: ".venv/bin/dt-registry",
  network: ".venv/bin/dt-network",
};
if (!programs[app]) throw new Error(`DT_APP ${app} is no program: give miner, validator, registry or network`);
const override = path.join(home, app === "miner" ? "app.config.override.js" : `${app}.override.js`);

function rows(file) {
  const found = fs.existsSync(file) ? require(file) : [];
  if (Array.isArray(found) && found.every(Array.isArray)) return found;
  throw new Error(`${file} exports no rows: module.exports = [["--wallet.name", "mine"]];`);
}
const ours = { miner: flags, validator: [], registry: [["serve"]], network: [["run"]] };
const given = rows(override);
// Of several machines: a row ["torchrun", "--nnodes", "2", ...], see docs/several-machines.md.
const torchrun = given.filter((row) => row[0] === "torchrun").flat().slice(1).map(String);
const args = [
  ...ours[app],
  ...given.filter((row) => row[0] !== "torchrun"),
]
  .flat()
  .map(String);
const words = (process.env.DT_FLAGS || "").match(/(?:'[^']*'|"[^"]*"|[^\s'"])+/g) || [];
args.push(...words.map((word) => word.replace(/'([^']*)'|"([^"]*)"/g, "$1$2")));

const pagePort = args[args.lastIndexOf("--neuron.page_port") + 1];

// How long a stop may take, in seconds: the miner's own parser is asked, since the flag may stand in
// miner.toml too. Settings that it refuses are named here and by the start.
const python = path.join(__dirname, ".venv", "bin", "python");
function stopSeconds() {
  if (app === "registry") return 10;
  if (app === "network") return 600; // its validator's publication; a stop takes no longer for it
  const words = ["-m", "distributed_training", "stop-seconds", app, ...args];
  const asked = spawnSync(python, words, { cwd: home, encoding: "utf8", timeout: 60000 });
  if (asked.status === 2) console.error(asked.stderr.trim());
  return parseFloat(asked.stdout) || 60;
}

// pm2 takes a script with a blank in it for a command of a shell, but not a folder: from `home` the path
// has none, unless another folder on the way has. Then a link in `home`, one for each version, leads there.
const program = torchrun.length ? "ops/torchrun.sh" : programs[app];
function script(file) {
  const relative = path.relative(home, path.join(__dirname, file));
  if (!relative.includes(" ")) return relative;
  const link = `.version-${crypto.createHash("sha256").update(__dirname).digest("hex").slice(0, 12)}`;
  if (!fs.existsSync(path.join(home, link))) fs.symlinkSync(__dirname, path.join(home, link));
  return path.join(link, file);
}

// None where the flags say off, nor under torchrun, whose rank 0 has it.
const page = {
  name: `distributed_training_page${name && "_" + name}`,
  script: script("distributed_training/__main__.py"),
  interpreter: python,
  interpreter_args: "-u",
  args: ["page", ...args],
  cwd: home,
  env: { PYTHONSAFEPATH: "1" },
  autorestart: true,
  stop_exit_codes: [2], // settings that are refused, or no dashboard asked for
  exp_backoff_restart_delay: 1000,
  max_restarts: 1000000,
  merge_logs: true,
  time: false,
};

module.exports = {
  apps: [
    {
      name: `distributed_training_${app}${name && "_" + name}`,
      script: script(program),
      interpreter: torchrun.length ? "bash" : python,
      interpreter_args: torchrun.length ? "" : "-u",
      args: torchrun.length ? [...torchrun, "--", ...args] : args,
      cwd: home,
      env: { PYTHONSAFEPATH: "1" }, // modules come from this version, not from where it runs
      // Only the launcher gets pm2's SIGINT; it stops the ranks in order. Signalling the whole tree
      // would end data workers and uploads in the middle.
      treekill: false,
      // After the stop timeout the launcher ends the ranks by force, which takes up to 25 s more.
      kill_timeout: 1000 * (stopSeconds() + 25),
      autorestart: true,
      // Bad configuration, a hotkey lost or in use, a finished network: a start would not help (pm2 may then show
      // "waiting restart", but does not restart). 0 must not be among them: pm2 reports a launcher
      // killed by a signal, e.g. for want of memory, as 0, and it would stay down.
      stop_exit_codes: [2, 3, 4],
      exp_backoff_restart_delay: 1000, // grows to 15 s; reset once it has run for 30 s
      max_restarts: 1000000, // a chain or bucket that is away for a day must not end the miner
      merge_logs: true,
      time: false, // the lines carry their time
    },
    ...(app === "miner" && pagePort !== "off" && !torchrun.length ? [page] : []),
  ],
};
