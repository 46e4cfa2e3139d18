// Bundles src/ and uPlot into the page that the Python package ships: no CDN, nothing fetched while it runs.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";

const out = "../src/zero2all/track/page";
mkdirSync(out, { recursive: true });

// A test compares this with the sources, so that nobody forgets to build.
const digest = createHash("sha256");
for (const name of readdirSync("src").sort()) digest.update(readFileSync(`src/${name}`));
const banner = `/* zero2all, Apache-2.0; contains uPlot, MIT (see LICENSES.txt). Built from web/src ${digest.digest("hex")} */`;

await build({
  entryPoints: { app: "src/main.js" },
  bundle: true,
  minify: true,
  charset: "utf8",
  target: "es2020",
  outdir: out,
  banner: { js: banner },
  legalComments: "none",
});
copyFileSync("src/index.html", `${out}/index.html`);
writeFileSync(`${out}/LICENSES.txt`, `uPlot\n=====\n\n${readFileSync("node_modules/uplot/LICENSE", "utf8")}`);
